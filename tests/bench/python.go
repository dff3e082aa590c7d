package main

import (
	"context"
	"net/url"
	"path/filepath"
	"strconv"
)

// python compares plain and combined calls of the Python client on asyncpg, in one process. Its cells are named
// python/limiter/keys/callers.
type python struct{ npm }

var pythonLimiters = []string{"python/plain", "python/combined"}

func (*python) cells() (cells []string) {
	for _, keys := range npmKeys {
		for _, callers := range npmCallers {
			for _, limiter := range pythonLimiters {
				cells = append(cells, cellName(limiter, keys, callers))
			}
		}
	}
	return cells
}

func (p *python) open(ctx context.Context, _ []string) error {
	p.ways = map[string]elsewhere{}
	dir, err := folder(ctx, "python")
	if err != nil {
		return err
	}
	pg, err := p.database(ctx, "python", definePolicies()...)
	if err != nil {
		return err
	}
	socket, err := url.Parse(pg.URL("python"))
	if err != nil {
		return err
	}
	for _, limiter := range pythonLimiters {
		way, err := start(ctx, 1, []string{"PYTHONPATH=" + filepath.Join(dir, "../../../client/python")}, "sh", "-c",
			`for python in python3 /usr/bin/python3; do $python -c 'import asyncpg' && exec $python "$@"; done; exit 1`, "sh",
			filepath.Join(dir, "limiters.py"), filepath.Base(limiter), socket.Query().Get("host"), "python", strconv.Itoa(connections))
		if err != nil {
			return err
		}
		p.closers = append(p.closers, func() { _ = way.close() })
		p.ways[limiter] = way
		if _, err := way.run(ctx, 64, "uniform", p.window, pg.pid); err != nil { // a moment that does not count, to be warm
			return err
		}
	}
	return nil
}
