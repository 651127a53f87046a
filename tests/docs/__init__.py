"""The pages of docs/ hold: their snippets run, and imports keep to their floors."""
