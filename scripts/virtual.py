"""Tables and figures of VIRTUAL out of finished runs.

The same as `bfl-paper show virtual_TABLE` for all scales of which there are runs; `--help` lists tables and figures.
"""

from bfl_bench.commands.paper import run_script

if __name__ == "__main__":
    run_script("virtual")
