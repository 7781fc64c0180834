"""The notation of layouts: `scan` splits a text into tokens, `read` parses it, `write` prints it."""
