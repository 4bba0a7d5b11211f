"""One rank of a group of two that agrees with the other on the host; prints what they say together as JSON."""

from __future__ import annotations

import json
import sys

import torch

from workers.model.tensor_parallel import TensorParallelGroup

SAID = ([True, True, False, False], [True, False, True, False])


def main(rank: str, size: str, rendezvous: str) -> None:
    """Say what rank ``rank`` says."""
    group = TensorParallelGroup(int(rank), int(size), rendezvous, torch.device("cpu"))
    print(json.dumps(group.all_agree(list(SAID[int(rank)]))))
    group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
