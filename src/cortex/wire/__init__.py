"""The protocol between programs: typed requests, one event stream, a codec per dialect, node reports, the error
tree."""
