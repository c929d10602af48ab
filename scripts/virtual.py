"""Tables and figures of VIRTUAL out of finished runs.

The same as `python -m bfl_bench.papers.virtual`, which is in the wheel too; `--help` lists tables and figures.
"""

from bfl_bench.papers.virtual import main

if __name__ == "__main__":
    main()
