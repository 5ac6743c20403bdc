"""The families with experts or with recurrent layers."""
