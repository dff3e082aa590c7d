package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// The grid measures every opponent with every keyspace and number of callers, and those for joint requests with
// many users. Its cells are named opponent/keys/callers.
type grid struct {
	lab       *lab
	keyspaces map[string]*keyspace
	members   membership
	opponents map[string]*opponent
	needed    func(opponents ...string) bool
	closers   []func()
}

// An opponent is one way to decide.
type opponent struct {
	acquire acquirer
	server  int // its process
}

const gridDatabase = "grid"

var (
	callerCounts = []int{1, 16, 64, 256}
	keyNames     = []string{"uniform", "zipf", "hot"}
)

// A contender is an opponent's name in measures, and in tables and plots.
type contender struct{ name, title string }

// contenders are the opponents in the order in which they take turns: those who are compared follow
// each other.
var contenders = []contender{
	{"combined-noflush", "pgratelimit combined, no flush"},
	{"redis", "redis_rate"},
	{"combined-flush", "pgratelimit combined, flushed"},
	{"redis-pipelined", "redis_rate pipelined"},
	{"redis-aof", "redis_rate, appendfsync always"},
	{"redis-aof-pipelined", "redis_rate pipelined, appendfsync always"},
	{"combined-ephemeral", "pgratelimit combined, ephemeral"},
	{"plain-noflush", "pgratelimit plain, no flush"},
	{"plain-flush", "pgratelimit plain, flushed"},
	{"plain-ephemeral", "pgratelimit plain, ephemeral"},
	{"statements", "SQL: five statements, no flush"},
	{"serializable", "SQL: serializable with retries, no flush"},
}

// keyedContenders are those whose requests each have an idempotency key of their own. Redis' limiters know none.
var keyedContenders = []contender{
	{"keyed-combined-noflush", "pgratelimit combined, no flush"},
	{"keyed-plain-noflush", "pgratelimit plain, no flush"},
}

var keyedCallers = []int{64, 256}

// byTitle has those who are alike together.
func byTitle(contenders []contender) []contender {
	return slices.SortedFunc(slices.Values(contenders), func(a, b contender) int { return cmp.Compare(a.title, b.title) })
}

func cellName(opponent, keys string, callers int) string {
	return fmt.Sprintf("%s/%s/%d", opponent, keys, callers)
}

func (g *grid) cells() (cells []string) {
	for _, keys := range keyNames {
		for _, callers := range callerCounts {
			for _, opponent := range contenders {
				cells = append(cells, cellName(opponent.name, keys, callers))
			}
		}
	}
	for _, callers := range callerCounts {
		for _, opponent := range jointContenders {
			cells = append(cells, cellName(opponent.name, "uniform", callers))
		}
	}
	for _, callers := range keyedCallers {
		for _, opponent := range keyedContenders {
			cells = append(cells, cellName(opponent.name, "uniform", callers))
		}
	}
	return cells
}

func (g *grid) open(ctx context.Context, cells []string) error {
	g.keyspaces, g.members = keyspaces(), newMembership()
	g.opponents = map[string]*opponent{}
	g.needed = func(opponents ...string) bool {
		return slices.ContainsFunc(cells, func(cell string) bool {
			opponent, _, _ := strings.Cut(cell, "/")
			return slices.Contains(opponents, opponent)
		})
	}
	for _, flushed := range []bool{false, true} {
		name := map[bool]string{false: "redis", true: "redis-aof"}[flushed]
		if g.needed(name, name+"-pipelined") {
			if err := g.openRedis(ctx, name, flushed); err != nil {
				return err
			}
		}
	}
	if g.needed("joint-redis", "joint-script", "joint-script-pipelined") {
		if err := g.openJointRedis(ctx); err != nil {
			return err
		}
	}
	if err := g.openPostgres(ctx); err != nil {
		return err
	}
	return g.warmUp(ctx)
}

// warmUp lets each opponent run for a moment that does not count, so that the first is not the only
// one to find everything cold.
func (g *grid) warmUp(ctx context.Context) error {
	for name, o := range g.opponents {
		if !g.needed(name) {
			continue
		}
		l := load{callers: 64, keys: g.keyspaces["uniform"], acquire: o.acquire, servers: []int{o.server}}
		if _, err := l.run(ctx, g.lab.window); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

func (g *grid) openRedis(ctx context.Context, name string, flushed bool) error {
	server, err := g.lab.redisServer(ctx, flushed)
	if err != nil {
		return err
	}
	pipelined, err := server.AutoPipeline()
	if err != nil {
		return err
	}
	g.opponents[name] = &opponent{redisRate(server), server.pid}
	g.opponents[name+"-pipelined"] = &opponent{redisRate(pipelined), server.pid}
	for _, keys := range []string{"hot", "uniform"} {
		if err := g.keyspaces[keys].askForAll(ctx, g.opponents[name+"-pipelined"].acquire); err != nil {
			return err
		}
	}
	return nil
}

func (g *grid) openJointRedis(ctx context.Context) error {
	server, err := g.lab.redisServer(ctx, false)
	if err != nil {
		return err
	}
	pipelined, err := server.AutoPipeline()
	if err != nil {
		return err
	}
	if err := redisRate(server)(ctx, everybody); err != nil { // sends the script
		return err
	}
	g.opponents["joint-redis"] = &opponent{g.members.redisRate(server), server.pid}
	g.opponents["joint-script"] = &opponent{g.members.script(server), server.pid}
	g.opponents["joint-script-pipelined"] = &opponent{g.members.script(pipelined), server.pid}
	for _, name := range []string{"joint-redis", "joint-script-pipelined"} {
		if err := g.keyspaces["uniform"].askForAll(ctx, g.opponents[name].acquire); err != nil {
			return err
		}
	}
	return nil
}

func (g *grid) openPostgres(ctx context.Context) error {
	pg, err := g.lab.postgres(ctx)
	if err != nil {
		return err
	}
	setUp := slices.Concat(definePolicies(), defineJointPolicies(), []string{limiterTable, fillLimiter(), "vacuum analyze"})
	if err := pg.database(ctx, gridDatabase, setUp...); err != nil {
		return err
	}
	for _, mode := range modes {
		pool, err := pg.pool(ctx, gridDatabase, mode.flush, mode.connections)
		if err != nil {
			return err
		}
		g.closers = append(g.closers, pool.Close)
		limiter, combiner := client.New(pool), newCombiner(pool, g.lab.calls)
		g.closers = append(g.closers, combiner.Close)
		g.opponents["plain-"+mode.name] = &opponent{pgratelimit(limiter, mode.policy), pg.pid}
		g.opponents["combined-"+mode.name] = &opponent{pgratelimit(combiner, mode.policy), pg.pid}
		if mode.name == "noflush" {
			g.opponents["joint-plain-noflush"] = &opponent{g.members.pgratelimit(limiter), pg.pid}
			g.opponents["joint-combined-noflush"] = &opponent{g.members.pgratelimit(combiner), pg.pid}
			g.opponents["keyed-plain-noflush"] = &opponent{keyed(limiter, mode.policy), pg.pid}
			g.opponents["keyed-combined-noflush"] = &opponent{keyed(combiner, mode.policy), pg.pid}
			g.opponents["statements"] = &opponent{statements(pool), pg.pid}
			g.opponents["serializable"] = &opponent{serializable(pool), pg.pid}
		}
	}
	return nil
}

// The modes of durability. An ephemeral policy does not wait for the disk though its sessions would.
var modes = []struct {
	name, policy string
	flush        bool
	connections  int32
}{
	{"noflush", "durable", false, connections},
	{"flush", "durable", true, connectionsFlushed},
	{"ephemeral", "ephemeral", true, connections},
}

func (g *grid) run(ctx context.Context, cell string) (sample, error) {
	var (
		keys    string
		callers int
	)
	name, rest, _ := strings.Cut(cell, "/")
	keys, rest, _ = strings.Cut(rest, "/")
	if _, err := fmt.Sscan(rest, &callers); err != nil {
		return nil, err
	}
	o := g.opponents[name]
	l := load{
		callers: callers,
		keys:    g.keyspaces[keys],
		acquire: o.acquire,
		servers: []int{o.server},
	}
	return l.run(ctx, g.lab.window)
}

func (g *grid) cost() time.Duration { return time.Duration((1 + warmUp) * float64(g.lab.window)) }

func (g *grid) close(ctx context.Context) error {
	for _, close := range slices.Backward(g.closers) {
		close()
	}
	return g.lab.dropDatabases(ctx, gridDatabase)
}
