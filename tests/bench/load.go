package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// An acquirer takes one token of a key's bucket. No bucket runs dry here, so a denial is an error.
type acquirer func(ctx context.Context, key string) error

type manyAcquirer func(ctx context.Context, keys []string) error

type opponent struct {
	acquire acquirer
	many    manyAcquirer // in place of acquire: some callers ask in one call
	server  []int        // the processes whose CPU time is counted with their children's
	before  acquirer     // is asked for every key before each run
}

var loadCell = regexp.MustCompile(`^(.+)/(uniform|hot)/(\d+)$`)

func cellsOf(opponents, keys []string, callers ...int) (cells []string) {
	for _, keys := range keys {
		for _, callers := range callers {
			for _, opponent := range opponents {
				cells = append(cells, fmt.Sprintf("%s/%s/%d", opponent, keys, callers))
			}
		}
	}
	return cells
}

// loads measures cells named opponent/keys/callers. Each opponent first runs for a moment that does not count, or the first alone were cold.
func loads(ctx context.Context, window time.Duration, cells []string, opponents map[string]opponent) measure {
	keyspaces, warm := keyspaces(), map[string]bool{}
	measure := measure(func(ctx context.Context, cell string) (sample, error) {
		part := loadCell.FindStringSubmatch(cell)
		callers, _ := strconv.Atoi(part[3])
		l := load{callers: callers, keys: keyspaces[part[2]], opponent: opponents[part[1]]}
		if l.before != nil {
			check(l.keys.askForAll(ctx, l.before))
		}
		return l.run(ctx, window)
	})
	for _, cell := range cells {
		if opponent := loadCell.FindStringSubmatch(cell)[1]; !warm[opponent] {
			warm[opponent] = true
			if _, err := measure.of(ctx, cell); err != nil {
				panic(failure{fmt.Errorf("%s: %w", cell, err)})
			}
		}
	}
	return measure
}

// A load is callers that each ask again as soon as they are answered.
type load struct {
	callers int
	keys    *keyspace
	opponent
}

// perCall is how many callers share a call of a manyAcquirer.
const perCall = 32

// warmUp is how much of a window goes before it: connections are made and statements prepared.
const warmUp = 0.3

// run measures for a while. A call counts when it ends within that time.
func (l load) run(ctx context.Context, window time.Duration) (sample, error) {
	return l.during(ctx, time.Duration(warmUp*float64(window)), func(ctx context.Context) error {
		return pause(ctx, window)
	})
}

// during measures for as long as what goes on beside the load takes.
func (l load) during(ctx context.Context, warmUp time.Duration, beside func(context.Context) error) (sample, error) {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	ask, inCall := l.many, perCall
	if ask == nil {
		ask, inCall = func(ctx context.Context, keys []string) error { return l.acquire(ctx, keys[0]) }, 1
	}
	var (
		callers         sync.WaitGroup
		counting, ended atomic.Bool
		latencies       = make([][]time.Duration, l.callers/inCall)
	)
	for i := range latencies {
		callers.Go(func() {
			next, keys := l.keys.from(i), make([]string, inCall)
			for begin := time.Now(); !ended.Load(); {
				for i := range keys {
					keys[i] = next()
				}
				if err := ask(ctx, keys); err != nil {
					fail(err)
					return
				}
				end := time.Now()
				if counting.Load() {
					latencies[i] = append(latencies[i], end.Sub(begin))
				}
				begin = end
			}
		})
	}
	_ = pause(ctx, warmUp) // an error of the callers is looked at below

	own, server, begin := cpuOwn(), pgtest.CPUTime(l.server...), time.Now() // last: to read the times of all processes takes its own
	counting.Store(true)
	err := beside(ctx)
	counting.Store(false)
	elapsed := time.Since(begin)
	own, server = cpuOwn()-own, pgtest.CPUTime(l.server...)-server
	ended.Store(true)
	callers.Wait()
	if cause := context.Cause(ctx); cause != nil {
		return nil, cause
	}
	if err != nil {
		return nil, err
	}
	all := slices.Concat(latencies...)
	slices.Sort(all)
	decisions := float64(max(1, inCall*len(all)))
	return sample{
		rate:      float64(inCall*len(all)) / elapsed.Seconds(),
		p99:       quantile(all, 0.99),
		cpuServer: 1e6 * server / decisions,
		cpuClient: own / decisions,
	}, nil
}

// quantile returns microseconds.
func quantile(sorted []time.Duration, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return float64(sorted[int(q*float64(len(sorted)-1))].Nanoseconds()) / 1000
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// A keyspace is the keys that callers ask for, in a random order drawn beforehand: it costs no opponent anything, and all get the same.
type keyspace struct {
	keys  []string
	order []uint32
}

const (
	manyKeys           = 100_000
	hotKey             = "hot"
	userPrefix         = "user:"
	organisationPrefix = "organisation:"
)

var keyNames = []string{"uniform", "hot"}

// keyspaces are the shapes of traffic by name.
func keyspaces() map[string]*keyspace {
	uniform := keyspace{make([]string, manyKeys), make([]uint32, 1<<20)}
	for i := range uniform.keys {
		uniform.keys[i] = keyName(userPrefix, i+1)
	}
	source := rand.New(rand.NewPCG(1, 2))
	for i := range uniform.order {
		uniform.order[i] = source.Uint32N(manyKeys)
	}
	return map[string]*keyspace{"uniform": &uniform, "hot": {[]string{hotKey}, []uint32{0}}}
}

// keyName is prefix || n in SQL.
func keyName(prefix string, n int) string { return prefix + strconv.Itoa(n) }

// from returns the keys that one of many callers asks for, one after another.
func (k *keyspace) from(caller int) func() string {
	i := caller * 7919 % len(k.order)
	return func() string {
		key := k.keys[k.order[i]]
		if i++; i == len(k.order) {
			i = 0
		}
		return key
	}
}

func (k *keyspace) askForAll(ctx context.Context, acquire acquirer) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(64)
	for _, key := range k.keys {
		group.Go(func() error { return acquire(ctx, key) })
	}
	return group.Wait()
}

// latency is what a network adds to a round trip: half of it on the way to the server, half on the way back.
type latency time.Duration

// dial connects to a server through a proxy in this process. Closing either end closes the other.
func (l latency) dial(ctx context.Context, network, address string) (net.Conn, error) {
	server, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	client, near := net.Pipe()
	go carry(near, server, time.Duration(l/2))
	go carry(server, near, time.Duration(l/2))
	return client, nil
}

// carry writes what it reads so much later. Pieces wait in a queue, so none delays those behind it.
func carry(from, to net.Conn, delay time.Duration) {
	type piece struct {
		bytes []byte
		due   time.Time
	}
	pieces := make(chan piece, 1024)
	go func() {
		defer to.Close()
		alarm := newAlarm()
		defer alarm.Close()
		for p := range pieces {
			alarm.sleepUntil(p.due)
			if _, err := to.Write(p.bytes); err != nil {
				from.Close()
			}
		}
	}()
	defer close(pieces)
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		pieces <- piece{slices.Clone(buffer[:n]), time.Now().Add(delay)}
	}
}
