package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
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

const npmDatabase = "npm"

var (
	npmLimiters = []string{"npm/plain", "npm/combined", "npm/rate-limiter-flexible"}
	npmCallers  = []int{64, 256}
	npmKeys     = []string{"uniform", "hot"}
)

func (*npm) cells() (cells []string) {
	for _, keys := range npmKeys {
		for _, callers := range npmCallers {
			for _, c := range npmLimiters {
				cells = append(cells, cellName(c, keys, callers))
			}
		}
	}
	return cells
}

func (n *npm) open(ctx context.Context, cells []string) error {
	n.ways = map[string]elsewhere{}
	dir, err := npmPackages(ctx)
	if err != nil {
		return err
	}
	pg, err := n.database(ctx, npmDatabase, definePolicies()...)
	if err != nil {
		return err
	}
	socket, err := url.Parse(pg.URL(npmDatabase))
	if err != nil {
		return err
	}
	for _, c := range npmLimiters {
		if !slices.ContainsFunc(cells, func(cell string) bool { return strings.HasPrefix(cell, c+"/") }) {
			continue
		}
		way, err := start(ctx, 1, nil, "node", filepath.Join(dir, "opponents.mjs"), filepath.Base(c),
			socket.Query().Get("host"), npmDatabase, strconv.Itoa(connections))
		if err != nil {
			return err
		}
		n.closers = append(n.closers, func() { _ = way.close() })
		n.ways[c] = way
	}
	err = pg.exec(ctx, npmDatabase, // every key has a row, as the buckets have
		fmt.Sprintf("insert into flexible select 'flexible:%s' || i, 1, (extract(epoch from now()) + 86400) * 1000 from generate_series(1, %d) as i", userPrefix, manyKeys),
		"vacuum analyze")
	if err != nil && n.ways["npm/rate-limiter-flexible"] != nil {
		return err
	}
	for _, way := range n.ways { // a moment that does not count, for each to be warm
		if _, err := way.run(ctx, npmCallers[0], "uniform", n.window, pg.pid); err != nil {
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
	if _, err := os.Stat(filepath.Join(dir, "node_modules")); err == nil {
		return dir, nil
	}
	install := exec.CommandContext(ctx, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
	install.Dir = dir
	if text, err := install.CombinedOutput(); err != nil {
		return "", errors.Join(fmt.Errorf("npm ci: %w\n%s", err, text), os.RemoveAll(filepath.Join(dir, "node_modules")))
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
	return n.ways[part[0]+"/"+part[1]].run(ctx, callers, part[2], n.window, n.pg.pid)
}
