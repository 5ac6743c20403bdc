"""Pictures of a conversation: their files in a request, the headers of files, and limits.

What a client sends is a picture everywhere; `image` occurs only in names that APIs, checkpoints and libraries dictate.
The vision tower is the part of a model that reads pictures, and `vision` the ability and its option. Media are
pictures, sound and video together.
"""
