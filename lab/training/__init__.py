"""How the embedded models were trained; nothing else needs it."""
