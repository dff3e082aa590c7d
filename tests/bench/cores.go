package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/pgratelimit/pgratelimit/client"
)

// cores measures what a core more gives, with 256 callers over many keys. In its cells cores/1 PostgreSQL has one core and the client
// another, by taskset; in those of cores/2 both have both.
type cores struct {
	stage
	ways map[string]acquirer
}

const coresDatabase = "cores"

func (*cores) cells() []string {
	return []string{"cores/1/combined", "cores/2/combined", "cores/1/plain", "cores/2/plain"}
}

func (c *cores) open(ctx context.Context, _ []string) error {
	pg, err := c.database(ctx, coresDatabase, append(definePolicies(), "vacuum analyze")...)
	if err != nil {
		return err
	}
	pool, err := c.pool(ctx, pg.URL(coresDatabase), false, connections)
	if err != nil {
		return err
	}
	c.ways = map[string]acquirer{"combined": pgratelimit(c.combiner(pool)), "plain": pgratelimit(client.New(pool))}
	return nil
}

func (c *cores) run(ctx context.Context, cell string) (sample, error) {
	_, rest, _ := strings.Cut(cell, "/")
	count, way, _ := strings.Cut(rest, "/")
	server, own := "0-1", "0-1"
	if count == "1" {
		server, own = "0", "1"
	}
	defer func() { _ = c.pin("0-1", "0-1") }()
	l := load{callers: 256, keys: keyspaces()["uniform"], acquire: c.ways[way], servers: []int{c.pg.pid}}
	if _, err := l.run(ctx, c.window/5); err != nil { // makes the connections, whose processes are pinned
		return nil, err
	}
	if err := c.pin(server, own); err != nil {
		return nil, err
	}
	return l.run(ctx, c.window)
}

// pin tells the cores on which the server's processes run, and those of this process.
func (c *cores) pin(server, own string) error {
	for _, pid := range append(children(c.pg.pid), c.pg.pid) {
		_ = exec.Command("taskset", "-pc", server, strconv.Itoa(pid)).Run() // it may have ended
	}
	if out, err := exec.Command("taskset", "-apc", own, strconv.Itoa(os.Getpid())).CombinedOutput(); err != nil {
		return fmt.Errorf("taskset, which takes two cores: %w: %s", err, out)
	}
	return nil
}
