"""A node counts as empty when no request passes through it, and not a moment before."""

from __future__ import annotations

from deploy.drain_node import HAPROXY_SESSIONS, IN_FLIGHT, num_requests, wait_until_empty

PAGES = {"ingress": IN_FLIGHT, "haproxy": HAPROXY_SESSIONS}


class Node:
    """A node whose requests end at set times; seconds pass with each sleep."""

    def __init__(self, ingress_until_s: float, haproxy_until_s: float) -> None:
        self.now_s = 0.0
        self._until_s = {"ingress": ingress_until_s, "haproxy": haproxy_until_s}

    def fetch(self, url: str) -> str:
        value = int(self.now_s < self._until_s[url])
        return f'# TYPE {PAGES[url]} gauge\n{PAGES[url]}{{model="a"}} {value}\n{PAGES[url]}{{model="b"}} 0\n'

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def drain(self, timeout_s: float = 100.0, settle_s: float = 0.0) -> bool:
        return wait_until_empty(PAGES, timeout_s, settle_s, self.fetch, lambda: self.now_s, self.sleep)


def test_it_waits_for_the_last_request_of_its_own_and_of_others_behind_its_haproxy() -> None:
    for node in (Node(30, 0), Node(0, 30)):
        assert node.drain()
        assert 30 <= node.now_s < 40


def test_it_waits_a_little_even_if_nothing_passes_since_traffic_still_arrives() -> None:
    node = Node(0, 0)

    assert node.drain(settle_s=15)
    assert 15 <= node.now_s < 20


def test_it_gives_up_in_time() -> None:
    node = Node(1000, 0)

    assert not node.drain(timeout_s=50)
    assert node.now_s < 55


def test_a_node_without_ingress_or_proxy_has_no_requests() -> None:
    assert num_requests(None, IN_FLIGHT) == 0
    assert (
        num_requests(
            'shoal_requests_in_flight{model="a"} 2\nshoal_requests_in_flight{model="b"} 3\n', IN_FLIGHT
        )
        == 5
    )
