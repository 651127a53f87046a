"""What a run accumulates on the device."""
