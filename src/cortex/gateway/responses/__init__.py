"""The Responses API with state: stored responses, requests that refer to them, and responses in the background."""
