package main

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
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
	closed := load{callers: 512, keys: o.keys, acquire: pgratelimit(o.combiner, "durable"), server: o.lab.pg.pid}
	best, err := closed.run(ctx, window)
	if err != nil {
		return nil, err
	}
	if cell == "overload/frozen" {
		return o.freeze(ctx, best[rate])
	}
	over := o.offer(ctx, overloadFactor*best[rate], window)
	fallen := o.offer(ctx, best[rate]/2, window)
	return sample{
		"best": best[rate], "goodput": over.rate(), "refused": over.refusedRate(), "told": over.told(),
		"refused_after": float64(fallen.refused.Load()),
	}, nil
}

// freeze stops the server for a while. Statements that the server has done once it is thawed, beyond what callers were granted,
// are those of callers that have left.
func (o *overload) freeze(ctx context.Context, best float64) (sample, error) {
	pg := o.lab.pg
	if err := pg.Freeze(ctx); err != nil {
		return nil, err
	}
	frozen := o.offer(ctx, best/2, frozenFor)
	if err := pg.Thaw(ctx); err != nil {
		return nil, err
	}
	o.offer(ctx, best/2, time.Second)
	used := cpuOf(pg.pid)
	thawed := o.offer(ctx, best/2, 2*time.Second)
	used = cpuOf(pg.pid) - used
	sessions, err := queryRow[int](ctx, pg, overloadDatabase, "select count(*) from pg_stat_activity where datname = current_database()")
	return sample{
		"told": frozen.told(), "late": float64(frozen.late.Load()), "goodput": thawed.rate(), "best": best / 2,
		"cpu": used.Seconds() / 2, "sessions": float64(sessions),
	}, err
}

// An offered load is callers that arrived, and what became of them.
type offered struct {
	during                 time.Duration
	granted, refused, late atomic.Int64 // late: they waited for the end of their time, or longer
	refusedInTime          atomic.Int64
}

func (o *offered) rate() float64        { return float64(o.granted.Load()) / o.during.Seconds() }
func (o *offered) refusedRate() float64 { return float64(o.refused.Load()) / o.during.Seconds() }

// told is the part of those refused who were told within their time.
func (o *offered) told() float64 {
	return float64(o.refusedInTime.Load()) / float64(max(1, o.refused.Load()))
}

// offer lets callers arrive at a rate, and waits for all of them.
func (o *overload) offer(ctx context.Context, perSecond float64, during time.Duration) *offered {
	var (
		callers sync.WaitGroup
		result  = &offered{during: during}
		begin   = time.Now()
		next    = o.keys.from(1)
	)
	for arrived := 0; time.Since(begin) < during; {
		for due := int(perSecond * time.Since(begin).Seconds()); arrived < due; arrived++ {
			key := next()
			callers.Go(func() { result.count(o.ask(ctx, key)) })
		}
		_ = pause(ctx, time.Millisecond)
	}
	callers.Wait()
	return result
}

func (o *overload) ask(ctx context.Context, key string) (took time.Duration, err error) {
	begin := time.Now()
	ctx, cancel := context.WithTimeout(ctx, overloadDeadline)
	defer cancel()
	_, err = o.combiner.Acquire(ctx, "durable", key)
	return time.Since(begin), err
}

func (o *offered) count(took time.Duration, err error) {
	inTime := took <= overloadDeadline
	switch {
	case err == nil && inTime:
		o.granted.Add(1)
	case errors.Is(err, client.ErrOverloaded):
		o.refused.Add(1)
		if inTime {
			o.refusedInTime.Add(1)
		}
	default:
		o.late.Add(1)
	}
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
