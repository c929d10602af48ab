"""Tables and figures of FedLPA out of finished runs.

The same as `bfl-paper show fedlpa_TABLE` for all scales of which there are runs; `--help` lists tables and figures.
"""

from bfl_bench.commands.paper import run_script

if __name__ == "__main__":
    run_script("fedlpa")
