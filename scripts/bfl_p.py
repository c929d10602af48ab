"""Figure 1 and tables 1 to 5 of BFL-P out of finished runs.

The same as `bfl-paper show bfl_p_TABLE` for all scales of which there are runs; `--help` lists tables and figures.
"""

from bfl_bench.commands.paper import run_script

if __name__ == "__main__":
    run_script("bfl_p")
