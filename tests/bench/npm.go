package main

import (
	"context"
	"fmt"
	"net/url"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// npm compares the Node client with limiters of npm on PostgreSQL, in one process of Node.js.
// Its cells are named npm/limiter/keys/callers.
type npm struct {
	stage
	ways map[string]elsewhere // by limiter
}

// python compares plain and combined calls of the Python client on asyncpg, in one process. Its cells are named
// python/limiter/keys/callers.
type python struct{ npm }

var (
	npmLimiters    = []string{"npm/plain", "npm/combined", "npm/rate-limiter-flexible"}
	pythonLimiters = []string{"python/plain", "python/combined"}
)

func (*npm) cells() []string    { return cellsOf(npmLimiters) }
func (*python) cells() []string { return cellsOf(pythonLimiters) }

func cellsOf(limiters []string) (cells []string) {
	for _, keys := range keyNames {
		for _, callers := range fewCallers {
			for _, limiter := range limiters {
				cells = append(cells, cellName(limiter, keys, callers))
			}
		}
	}
	return cells
}

func (n *npm) open(ctx context.Context, cells []string) error {
	dir, err := npmPackages(ctx)
	if err != nil {
		return err
	}
	if err := n.begin(ctx, "npm", npmLimiters, cells, nil, "node", filepath.Join(dir, "opponents.mjs")); err != nil {
		return err
	}
	err = n.pg.exec(ctx, "npm", // every key has a row, as the buckets have
		fmt.Sprintf("insert into flexible select 'flexible:%s' || i, 1, (extract(epoch from now()) + 86400) * 1000 from generate_series(1, %d) as i", userPrefix, manyKeys),
		"vacuum analyze")
	if err != nil && n.ways["npm/rate-limiter-flexible"] != nil {
		return err
	}
	return n.warm(ctx)
}

func (p *python) open(ctx context.Context, cells []string) error {
	dir, err := folder(ctx, "python")
	if err != nil {
		return err
	}
	const run = `for python in python3 /usr/bin/python3; do $python -c 'import asyncpg' && exec $python "$@"; done; exit 1`
	err = p.begin(ctx, "python", pythonLimiters, cells, []string{"PYTHONPATH=" + filepath.Join(dir, "../../../client/python")},
		"sh", "-c", run, "sh", filepath.Join(dir, "limiters.py"))
	if err != nil {
		return err
	}
	return p.warm(ctx)
}

// begin starts a process for each limiter of the cells, on a database of their own.
func (n *npm) begin(ctx context.Context, database string, limiters, cells, env []string, command ...string) error {
	n.ways = map[string]elsewhere{}
	pg, err := n.database(ctx, database, definePolicies()...)
	if err != nil {
		return err
	}
	socket, err := url.Parse(pg.URL(database))
	if err != nil {
		return err
	}
	for _, limiter := range limiters {
		if !slices.ContainsFunc(cells, func(cell string) bool { return strings.HasPrefix(cell, limiter+"/") }) {
			continue
		}
		way, err := start(ctx, 1, env, slices.Concat(command, []string{filepath.Base(limiter), socket.Query().Get("host"), database, strconv.Itoa(connections)})...)
		if err != nil {
			return err
		}
		n.closers = append(n.closers, func() { _ = way.close() })
		n.ways[limiter] = way
	}
	return nil
}

// warm lets each limiter run for a moment that does not count.
func (n *npm) warm(ctx context.Context) error {
	for _, way := range n.ways {
		if _, err := way.run(ctx, fewCallers[0], "uniform", n.window); err != nil {
			return err
		}
	}
	return nil
}

// npmPackages returns the folder of opponents.mjs, with what it needs.
func npmPackages(ctx context.Context) (string, error) {
	dir, err := folder(ctx, "node")
	if err != nil {
		return "", err
	}
	install := exec.CommandContext(ctx, "make", "--no-print-directory", "tests/bench/node/node_modules")
	install.Dir = filepath.Join(dir, "../../..")
	if text, err := install.CombinedOutput(); err != nil {
		return "", fmt.Errorf("npm install: %w\n%s", err, text)
	}
	return dir, nil
}

// folder returns a folder beside this file.
func folder(ctx context.Context, name string) (string, error) {
	list, err := exec.CommandContext(ctx, "go", "list", "-f", "{{.Dir}}", "github.com/pgratelimit/pgratelimit/tests/bench").Output()
	if err != nil {
		return "", fmt.Errorf("go list: %w", err)
	}
	return filepath.Join(strings.TrimSpace(string(list)), name), nil
}

func (n *npm) run(ctx context.Context, cell string) (sample, error) {
	part := strings.Split(cell, "/")
	callers, err := strconv.Atoi(part[3])
	if err != nil {
		return nil, err
	}
	return n.ways[part[0]+"/"+part[1]].run(ctx, callers, part[2], n.window)
}
