package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/pgratelimit/pgratelimit/client"
)

// The grid measures every opponent with every keyspace and number of callers, and those for joint requests with
// many users. Its cells are named opponent/keys/callers.
type grid struct {
	stage
	keyspaces map[string]*keyspace
	members   membership
	opponents map[string]*opponent
	needed    func(opponents ...string) bool
	flood     acquirer // asks for a token of an empty bucket, and remembers the denial
}

// An opponent is one way to decide.
type opponent struct {
	acquire acquirer
	server  int // its process
}

var (
	callerCounts = []int{1, 16, 64, 256}
	keyNames     = []string{"uniform", "hot"}
)

// contenders are the opponents in the order in which they take turns: those that are compared follow
// each other.
var contenders = []string{
	"combined-noflush", "redis", "combined-flush", "redis-pipelined", "redis-aof", "redis-aof-pipelined", "plain-noflush", "plain-flush", "statements",
}

// fewContenders are compared with many callers and many keys only.
var fewContenders = []string{
	"joint-combined-noflush", "joint-redis", "joint-script", "joint-script-pipelined",
}

var deniedContenders = []string{"half-combined", "half-redis", "half-cached", "flood-combined", "flood-redis", "flood-cached"}

// heldContenders lend slots instead of taking tokens, to fewer callers than there are slots.
var heldContenders = []string{"held", "held-redis"}

var fewCallers = []int{64, 256}

func cellName(opponent, keys string, callers int) string {
	return fmt.Sprintf("%s/%s/%d", opponent, keys, callers)
}

func (g *grid) cells() (cells []string) {
	for _, keys := range keyNames {
		for _, callers := range callerCounts {
			inTable := callers == 64 || keys == "uniform" && callers != 16
			for _, opponent := range contenders {
				if inTable || isDrawn(opponent) {
					cells = append(cells, cellName(opponent, keys, callers))
				}
			}
		}
	}
	for _, callers := range fewCallers {
		for _, opponent := range slices.Concat(fewContenders, deniedContenders) {
			cells = append(cells, cellName(opponent, "uniform", callers))
		}
	}
	for _, opponent := range deniedContenders {
		cells = append(cells, cellName(opponent, "hot", 256))
	}
	for _, keys := range keyNames {
		for _, opponent := range heldContenders {
			cells = append(cells, cellName(opponent, keys, 64))
		}
	}
	return append(cells, cellName("keyed-combined-noflush", "uniform", 64)) // Redis' limiters know no idempotency key
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
	if g.needed("half-redis", "flood-redis") {
		if err := g.openDeniedRedis(ctx); err != nil {
			return err
		}
	}
	if g.needed("joint-redis", "joint-script", "joint-script-pipelined") {
		if err := g.openJointRedis(ctx); err != nil {
			return err
		}
	}
	if g.needed("held-redis") {
		server, err := g.redisServer(ctx, false)
		if err != nil {
			return err
		}
		g.opponents["held-redis"] = &opponent{heldRedis(server), server.pid}
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
		if _, err := l.run(ctx, g.window); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

func (g *grid) openRedis(ctx context.Context, name string, flushed bool) error {
	server, err := g.redisServer(ctx, flushed)
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
	server, err := g.redisServer(ctx, false)
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
	setUp := slices.Concat(definePolicies(), defineJointPolicies(), defineSlots(), defineDry(manyKeys),
		[]string{fmt.Sprintf("select ratelimit_acquire('dry', '%s')", hotKey), limiterTable, fillLimiter(), "vacuum analyze"})
	pg, err := g.database(ctx, "grid", setUp...)
	if err != nil {
		return err
	}
	for _, flush := range []bool{false, true} {
		mode, count := "noflush", int32(connections)
		if flush {
			mode, count = "flush", connectionsFlushed
		}
		pool, err := g.pool(ctx, pg.URL("grid"), flush, count)
		if err != nil {
			return err
		}
		combiner := g.combiner(pool)
		g.opponents["plain-"+mode] = &opponent{pgratelimit(client.New(pool)), pg.pid}
		g.opponents["combined-"+mode] = &opponent{pgratelimit(combiner), pg.pid}
		if !flush {
			g.opponents["joint-combined-noflush"] = &opponent{g.members.pgratelimit(combiner), pg.pid}
			g.opponents["keyed-combined-noflush"] = &opponent{keyed(combiner), pg.pid}
			g.opponents["held"] = &opponent{held(client.New(pool)), pg.pid}
			g.addDenied(pool, pg.pid)
			g.opponents["statements"] = &opponent{statements(pool), pg.pid}
		}
	}
	return nil
}

func (g *grid) run(ctx context.Context, cell string) (sample, error) {
	part := strings.Split(cell, "/")
	name, keys := part[0], part[1]
	callers, err := strconv.Atoi(part[2])
	if err != nil {
		return nil, err
	}
	o := g.opponents[name]
	if strings.HasSuffix(name, "-cached") { // as in an attack that goes on, whatever was measured before
		if err := g.keyspaces[keys].askForAll(ctx, g.flood); err != nil {
			return nil, err
		}
	}
	l := load{
		callers: callers,
		keys:    g.keyspaces[keys],
		acquire: o.acquire,
		servers: []int{o.server},
	}
	return l.run(ctx, g.window)
}
