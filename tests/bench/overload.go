package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/client"
)

// overload measures a combining client with more callers than its database can answer: three times as many, and any while the
// database is frozen. Its callers do not wait for each other, and have a deadline. The server is 20 ms away, so that one call in
// flight is what bounds it, and not the processor that the callers share with it.
type overload struct {
	lab      *lab
	keys     *keyspace
	pool     *pgxpool.Pool
	combiner *client.Combiner
}

const (
	overloadDatabase = "overload"
	overloadAway     = 20 * time.Millisecond
	overloadDeadline = 200 * time.Millisecond
	overloadFactor   = 3
	frozenFor        = 10 * time.Second
)

func (*overload) cells() []string { return []string{"overload/3x", "overload/frozen"} }

func (o *overload) open(ctx context.Context, _ []string) error {
	o.keys = keyspaces()["uniform"]
	pg, err := o.lab.postgres(ctx)
	if err != nil {
		return err
	}
	if err := pg.database(ctx, overloadDatabase, append(definePolicies(), "vacuum analyze")...); err != nil {
		return err
	}
	o.pool, err = pg.pool(ctx, overloadDatabase, false, connections, func(config *pgxpool.Config) {
		config.ConnConfig.DialFunc = latency(overloadAway).dial
		config.ConnConfig.ConnectTimeout = 5 * time.Second
	})
	if err != nil {
		return err
	}
	o.combiner = newCombiner(o.pool, 1)
	return nil
}

func (o *overload) run(ctx context.Context, cell string) (sample, error) {
	window := 2 * o.lab.window
	closed := load{callers: 512, keys: o.keys, acquire: pgratelimit(o.combiner, "durable"), servers: []int{o.lab.pg.pid}}
	found, err := closed.run(ctx, window)
	if err != nil {
		return nil, err
	}
	if cell == "overload/frozen" {
		return o.freeze(ctx, found[rate]/2)
	}
	over := o.offer(ctx, overloadFactor*found[rate], window)
	over[best] = found[rate]
	over["told"] = over[refused] / max(1e-9, over[refused]+over[late])
	over["refused_after"] = o.offer(ctx, found[rate]/2, window)[refused]
	return over, ctx.Err()
}

// freeze stops the server for a while, under a load that it could answer.
func (o *overload) freeze(ctx context.Context, perSecond float64) (sample, error) {
	pg := o.lab.pg
	if err := pg.Freeze(ctx); err != nil {
		return nil, err
	}
	frozen := o.offer(ctx, perSecond, frozenFor)
	if err := pg.Thaw(ctx); err != nil {
		return nil, err
	}
	o.offer(ctx, perSecond, time.Second)
	used := cpuOf(pg.pid)
	thawed := o.offer(ctx, perSecond, 2*time.Second)
	used = cpuOf(pg.pid) - used
	sessions, err := queryRow[int](ctx, pg, overloadDatabase, "select count(*) from pg_stat_activity where datname = current_database()")
	thawed[best], thawed[refused], thawed[late] = perSecond, frozen[refused], frozen[late]
	thawed["cpu"], thawed["sessions"] = used.Seconds()/2, float64(sessions)
	return thawed, err
}

func (o *overload) offer(ctx context.Context, perSecond float64, during time.Duration) sample {
	return offer{
		keys: o.keys, acquire: pgratelimit(o.combiner, "durable"), perSecond: perSecond, deadline: overloadDeadline, during: during,
	}.run(ctx)
}

func (o *overload) cost() time.Duration { return frozenFor + 8*o.lab.window }

func (o *overload) close(ctx context.Context) error {
	if o.combiner != nil {
		o.combiner.Close()
	}
	if o.pool != nil {
		o.pool.Close()
	}
	return o.lab.dropDatabases(ctx, overloadDatabase)
}
