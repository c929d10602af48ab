"""Tables and figures of FedLPA out of finished runs.

The same as `python -m bfl_bench.papers.fedlpa`, which is in the wheel too; `--help` lists tables and figures.
"""

from bfl_bench.papers.fedlpa import main

if __name__ == "__main__":
    main()
