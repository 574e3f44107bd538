"""Work that a person starts and that runs to its end: importing trees into a volume."""
