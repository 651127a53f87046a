"""Every kernel with every compressor and participation."""
