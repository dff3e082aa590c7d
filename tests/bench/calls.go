package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// calls compares how many calls a combining client has in flight, near its server and far away. Its cells are
// named calls/added latency/calls in flight/callers.
type calls struct {
	lab     *lab
	keys    *keyspace
	acquire map[string]acquirer // by cell without its callers
	closers []func()
}

const callsDatabase = "calls"

var (
	callsCallers   = []int{64, 256}
	callsInFlight  = []int{1, 2, 4, 8}
	callsLatencies = []time.Duration{0, time.Millisecond}
)

func callsName(added time.Duration, inFlight int) string {
	return fmt.Sprintf("calls/%v/%d", added, inFlight)
}

// callsContenders are the clients that are compared.
func callsContenders() (contenders []contender) {
	for _, added := range callsLatencies {
		for _, inFlight := range callsInFlight {
			contenders = append(contenders, contender{callsName(added, inFlight), fmt.Sprintf("%v added, %d in flight", added, inFlight)})
		}
	}
	return contenders
}

func (*calls) cells() (cells []string) {
	for _, callers := range callsCallers {
		for _, contender := range callsContenders() {
			cells = append(cells, fmt.Sprintf("%s/%d", contender.name, callers))
		}
	}
	return cells
}

func (c *calls) open(ctx context.Context, _ []string) error {
	c.keys = keyspaces()["uniform"]
	c.acquire = map[string]acquirer{}
	pg, err := c.lab.postgres(ctx)
	if err != nil {
		return err
	}
	if err := pg.database(ctx, callsDatabase, append(definePolicies(), "vacuum analyze")...); err != nil {
		return err
	}
	for _, added := range callsLatencies {
		pool, err := pg.pool(ctx, callsDatabase, false, int32(slices.Max(callsInFlight)), func(config *pgxpool.Config) {
			if added > 0 {
				config.ConnConfig.DialFunc = latency(added).dial
			}
		})
		if err != nil {
			return err
		}
		c.closers = append(c.closers, pool.Close)
		for _, inFlight := range callsInFlight {
			combiner := newCombiner(pool, inFlight)
			c.acquire[callsName(added, inFlight)] = pgratelimit(combiner, "durable")
			c.closers = append(c.closers, combiner.Close)
		}
	}
	return nil
}

func (c *calls) run(ctx context.Context, cell string) (sample, error) {
	slash := strings.LastIndexByte(cell, '/')
	l := load{keys: c.keys, acquire: c.acquire[cell[:slash]], servers: []int{c.lab.pg.pid}}
	if _, err := fmt.Sscan(cell[slash+1:], &l.callers); err != nil {
		return nil, err
	}
	return l.run(ctx, c.lab.window)
}

func (c *calls) cost() time.Duration { return time.Duration((1 + warmUp) * float64(c.lab.window)) }

func (c *calls) close(ctx context.Context) error {
	for _, close := range slices.Backward(c.closers) {
		close()
	}
	return c.lab.dropDatabases(ctx, callsDatabase)
}
