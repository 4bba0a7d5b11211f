"""Text edge and placement: OpenAI HTTP, tokenizing, prefix index, policy, request journal."""
