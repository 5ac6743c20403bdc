"""What gateway and nodes exchange beside the dialects: control calls, headers, reports inside of responses."""
