"""Bridges to other libraries; import the module of the library you use."""
