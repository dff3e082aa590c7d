package client

import (
	"context"
	"encoding/binary"
	"errors"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

// placesEvery is how often a Citus reads where the shards are. A call that is sent elsewhere meanwhile is right, and slower.
const placesEvery = 5 * time.Second

// A Citus sends calls to the nodes of a Citus cluster that have their keys. Each shard has a Combiner, or with a [Prefetch] a
// [Prefetcher]. A shard that moves is followed.
//
// [Citus.On] has all calls about a key. Definitions, lists and clean-up are those of a [Limiter] on the coordinator.
//
// Close it when it is no longer used.
type Citus struct {
	coordinator limiter
	outer       Pool    // of it
	from        []int32 // the least hash of each shard, in order
	shards      []*Prefetcher
	places      []*placed // parallel to it
	open        func(ctx context.Context, host string, port int) (Pool, error)
	pools       map[node]Pool // of follow alone, once it runs
	moved       chan struct{} // a call has met a move
	stop        context.CancelFunc
	ended       sync.WaitGroup
}

// NewCitus returns a Citus on the cluster of a coordinator. It opens a pool for each node that has shards, and Close closes these. A node is
// asked through the coordinator while open fails, while the node does not answer, or answers with other nodes than the coordinator, and if
// Citus calls it localhost. The role needs EXECUTE on ratelimit_nodes, and the rights that [NewCombiner] names, or with a [Prefetch]
// [NewPrefetcher]. Options are the options of NewPrefetcher, for each of the shards. Panics where NewPrefetcher does.
func NewCitus(ctx context.Context, coordinator Pool, open func(ctx context.Context, host string, port int) (Pool, error), opts ...Option) (*Citus, error) {
	config := newConfig("NewCitus", aPrefetcher, opts)
	c := &Citus{coordinator: newLimiter(coordinator, config), outer: coordinator, open: open, pools: make(map[node]Pool), moved: make(chan struct{}, 1)}
	from, nodes, err := c.coordinator.nodes(ctx)
	if err != nil {
		return nil, err
	}
	c.from = from
	for range from {
		place := &placed{of: c}
		c.places = append(c.places, place)
		c.shards = append(c.shards, NewPrefetcher(place, opts...))
	}
	c.place(ctx, from, nodes)
	ctx, c.stop = context.WithCancel(context.Background())
	c.ended.Go(func() { c.follow(ctx) })
	return c, nil
}

// Shards returns the limiters of all shards, in an order that does not change.
func (c *Citus) Shards() []*Prefetcher { return c.shards }

// ShardOf returns the number of the shard that has a key, from 0, among Shards.
func (c *Citus) ShardOf(key string) int { return shardFrom(c.from, hashText(key)) }

// On returns the limiter of the shard that has a key.
func (c *Citus) On(key string) *Prefetcher { return c.shards[c.ShardOf(key)] }

// Acquire is [Prefetcher.Acquire] on the shard of key.
func (c *Citus) Acquire(ctx context.Context, policy, key string, opts ...CallOption) (Decision, error) {
	return c.On(key).Acquire(ctx, policy, key, opts...)
}

// AcquireAll is [Combiner.AcquireAll]. The cluster refuses charges of several keys with 0A000.
func (c *Citus) AcquireAll(ctx context.Context, charges []Charge, opts ...CallOption) (JointDecision, error) {
	on := c.shards[0] // without charges, any shard returns the error
	if len(charges) > 0 {
		on = c.On(charges[0].Key)
	}
	return on.AcquireAll(ctx, charges, opts...)
}

// Close closes the limiters of all shards at the same time, as [Prefetcher.Close] does, and the pools of the nodes.
func (c *Citus) Close() {
	c.stop()
	c.ended.Wait()
	var closing sync.WaitGroup
	for _, on := range c.shards {
		closing.Go(on.Close)
	}
	closing.Wait()
	for _, pool := range c.pools {
		pool.Close()
	}
}

// follow reads again and again where the shards are.
func (c *Citus) follow(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.moved:
		case <-time.After(placesEvery):
		}
		reading, cancel := context.WithTimeout(ctx, placesEvery)
		if from, nodes, err := c.coordinator.nodes(reading); err == nil { // else the places stay as they are
			c.place(reading, from, nodes)
		}
		cancel()
	}
}

// A node has shards.
type node struct {
	host string
	port int
}

// nodes reads the least hash of each shard, in order, and parallel to it the node that has the shard.
func (l *limiter) nodes(ctx context.Context) (from []int32, nodes []node, err error) {
	var hosts []string
	var ports []int
	err = l.query(ctx, call{
		verb: "find the nodes", function: "ratelimit_nodes()", repeatable: true,
		columns: "pg_catalog.array_agg(from_hash order by from_hash), pg_catalog.array_agg(host order by from_hash), pg_catalog.array_agg(port order by from_hash)",
	}, &from, &hosts, &ports)
	for i, host := range hosts {
		nodes = append(nodes, node{host, ports[i]})
	}
	if err == nil && len(nodes) == 0 {
		err = failed("find the nodes", errors.New("ratelimit.buckets is not distributed: run make install-citus, or citus.sql of the release"))
	}
	return from, nodes, err
}

// place has each shard ask the node that has it. Where shards were split, that is the node of their first part.
func (c *Citus) place(ctx context.Context, from []int32, nodes []node) {
	pools := make(map[node]*Pool)
	for _, at := range nodes {
		if pools[at] == nil {
			pools[at] = new(c.poolOf(ctx, at, nodes))
		}
	}
	for i, place := range c.places {
		place.pool.Store(pools[nodes[shardFrom(from, c.from[i])]])
	}
}

// poolOf returns the pool of a node, or the coordinator's if it cannot be asked.
func (c *Citus) poolOf(ctx context.Context, at node, nodes []node) Pool {
	if pool, isThere := c.pools[at]; isThere {
		return pool
	} else if at.host == "localhost" {
		return c.outer
	}
	asking, cancel := context.WithTimeout(ctx, placesEvery/5)
	defer cancel()
	pool, err := c.open(ctx, at.host, at.port)
	if err != nil || pool == nil {
		return c.outer
	}
	asks := c.coordinator
	asks.db = pool
	if _, its, err := asks.nodes(asking); err != nil || !slices.Equal(its, nodes) {
		pool.Close()
		return c.outer
	}
	c.pools[at] = pool
	return pool
}

// A placed is the Pool of a shard: that of the node that has it.
type placed struct {
	of   *Citus
	pool atomic.Pointer[Pool]
}

func (p *placed) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return placedRow{(*p.pool.Load()).QueryRow(ctx, sql, args...), p.of}
}

func (p *placed) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	return (*p.pool.Load()).BeginTx(ctx, options)
}

func (p *placed) Close() {}

// A placedRow tells its Citus of a move. One in a transaction of NoFlush does not.
type placedRow struct {
	pgx.Row
	of *Citus
}

func (r placedRow) Scan(dest ...any) error {
	err := r.Row.Scan(dest...)
	if isMoved(err) {
		select {
		case r.of.moved <- struct{}{}:
		default:
		}
	}
	return err
}

// shardFrom returns the number of the shard that has a hash, given the least hash of each.
func shardFrom(from []int32, hash int32) int {
	n, isThere := slices.BinarySearch(from, hash)
	if !isThere {
		n--
	}
	return max(0, n)
}

// hashText is hashtext of PostgreSQL, by which Citus finds the shard of a key: Bob Jenkins' lookup3 of 2006, in its order of bytes.
func hashText(key string) int32 {
	a := 0x9e3779b9 + uint32(len(key)) + 3923095
	b, c := a, a
	k := []byte(key)
	for ; len(k) >= 12; k = k[12:] {
		a += binary.LittleEndian.Uint32(k)
		b += binary.LittleEndian.Uint32(k[4:])
		c += binary.LittleEndian.Uint32(k[8:])
		for _, turn := range [6]int{4, 6, 8, 16, 19, 4} {
			a = a - c ^ bits.RotateLeft32(c, turn)
			a, b, c = b, c+b, a
		}
	}
	var rest [12]byte
	copy(rest[:8], k)
	if len(k) > 8 {
		copy(rest[9:], k[8:]) // the lowest byte of c is the length's
	}
	a += binary.LittleEndian.Uint32(rest[:])
	b += binary.LittleEndian.Uint32(rest[4:])
	c += binary.LittleEndian.Uint32(rest[8:])
	for _, turn := range [7]int{14, 11, 25, 16, 4, 14, 24} {
		c = c ^ b - bits.RotateLeft32(b, turn)
		a, b, c = b, c, a
	}
	return int32(b)
}
