"""What gateway and nodes exchange in addition to the dialects: control calls, headers, reports inside of responses."""
