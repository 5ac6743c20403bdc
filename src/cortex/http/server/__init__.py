"""The client's side of the data path: connections accepted, requests parsed, responses written."""
