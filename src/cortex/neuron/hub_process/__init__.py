"""Downloads from the hub with the hub's own client, `huggingface_hub`, in a process of their own.

Ending that process cancels a download at once, whatever native code it is in, and the daemon never imports the client.
"""
