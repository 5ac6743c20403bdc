"""The protocol between gateway and nodes beyond the dialects: control calls, headers, reports inside of responses."""
