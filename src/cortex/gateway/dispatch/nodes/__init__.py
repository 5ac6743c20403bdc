"""How the gateway reaches its nodes: control calls, polls, and addresses found by DNS."""
