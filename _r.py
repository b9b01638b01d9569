import collections

from tests.support.simulation.seeds import run_seeds

if __name__ == "__main__":
    for sc in ("shared run", "lost shards"):
        out = run_seeds(3000, 700, scenario=sc, processes=1)
        c = collections.Counter(o.kind for o in out if o.kind)
        print(sc, c, flush=True)
