"""The door to the engine: the only package that knows its socket and its binary."""
