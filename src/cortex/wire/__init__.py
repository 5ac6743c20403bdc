"""What crosses the wire: typed requests, one event stream, a codec per dialect, the error tree."""
