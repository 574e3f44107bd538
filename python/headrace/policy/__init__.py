"""Pure decisions: facts in, plan out. Nothing here reads a file, a socket or a clock."""
