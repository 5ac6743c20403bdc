"""The bytes and operations of a step, and the device's rates."""
