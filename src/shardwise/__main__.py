"""`python -m shardwise`: the command `shardwise`, where its script is not on the path."""

from shardwise.cli.main import app

if __name__ == "__main__":
    app(prog_name="shardwise")
