"""Table II and figures 2 to 12 of FOLA out of finished runs.

The same as `bfl-paper show fola_TABLE` for all scales of which there are runs; `--help` lists tables and figures.
"""

from bfl_bench.commands.paper import run_script

if __name__ == "__main__":
    run_script("fola")
