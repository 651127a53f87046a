"""Where clients, chains and states lie: the numbers of one device, wherever."""
