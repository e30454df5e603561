"""Which job gets how many nodes: the dynamic programme, its fast equal, the table made before a fault. Pure."""
