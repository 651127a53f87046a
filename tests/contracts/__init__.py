"""What every public constructor promises: the table of them, and the tests that go through it."""
