package main

import (
	"context"
	"flag"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// No figure of the page is written by hand: make bench-page writes them.
func TestPage_HasTheFiguresOfTheResults(t *testing.T) {
	t.Parallel()
	all := kit.NoError(readResults("results"))(t)
	page := kit.NoError(os.ReadFile("../../docs/performance.md"))(t)
	next := kit.NoError(renewPage(string(page), all))(t)
	require.Equal(t, next, string(page), "make bench-page")
	for name := range pageBlocks {
		require.Contains(t, string(page), "<!-- bench:"+name+" -->")
	}
	for _, wrong := range []string{"<!-- bench:unknown -->\n<!-- end -->\n", "<!-- bench:summary -->\n", "<!-- bench:Summary -->\n<!-- end -->\n"} {
		_, err := renewPage(wrong, nil)
		require.Error(t, err, wrong)
	}
}

// A row of the page whose measure is misspelt would never have a figure.
func TestPage_ShowsMeasuresThatThereAre(t *testing.T) {
	t.Parallel()
	r := report{Machine: map[string]string{"machine": "2 cores of a processor, 24 GB"}, Ratios: map[string]span{}, Cells: map[string]sample{}}
	cells, chosen, err := choose("*")
	require.NoError(t, err)
	for _, cell := range cells {
		r.Cells[cell] = sample{rate: 12345, p99: 12345, cpuServer: 12345, cpuClient: 12345, "bytes": 12345, "to_formula": 12345}
	}
	require.Len(t, chosen, len(ratios), "each ratio is of cells that there are")
	for _, c := range chosen {
		r.Ratios[c.name] = span{1, 2, 3}
	}
	for name, write := range pageBlocks {
		block := write(processor{&r, "bench"})
		for line := range strings.Lines(block) {
			if strings.HasPrefix(line, "|") {
				require.Less(t, strings.Count(line, "| – "), strings.Count(line, "|")-2, "no figure in %s", line)
			}
		}
		if name != "summary" && name != "distance" {
			require.NotContains(t, block, "–", name)
		}
	}
}

// A command of a page names cells by patterns, and a ratio names its own.
func TestChoose_TakesPatterns(t *testing.T) {
	t.Parallel()
	for only, want := range map[string][]string{
		"served/many/*, served/js*64": {"served/many/uniform/64", "served/json/uniform/64", "served/many/uniform/256"},
		"combined_64_*":               {"combined-noflush/uniform/64", "redis/uniform/64"},
		"npm/pl*64":                   {"npm/plain/uniform/64", "npm/plain/hot/64"},
		"held_to_*": { // and so on, of make bench-slots
			"bare/keyed", "bare/held", "bare/keyed-hot", "bare/held-hot", "held/uniform/64", "held-redis/uniform/64", "held/hot/64", "held-redis/hot/64",
		},
	} {
		cells, _, err := choose(only)
		require.NoError(t, err)
		require.Equal(t, want, cells)
	}
	_, _, err := choose("combined_64_*,typo")
	require.ErrorContains(t, err, "typo")
	cells, _, err := choose("")
	require.NoError(t, err)
	require.NotContains(t, cells, "snapshot/held")
}

// A process of this test binary obeys; what it counts is what it was granted.
func TestElsewhere_TellsWhatCallersOfAllProcessesGot(t *testing.T) {
	t.Parallel()
	executable := kit.NoError(os.Executable())(t)
	e, err := start(t.Context(), 3, executable, "-test.run=^TestElsewhere_Obeys$", "obey")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.close()) })
	for _, callers := range []int{1, 8} {
		var s sample
		for s[rate] == 0 { // on a slow machine a window may have no answer
			s, err = e.run(t.Context(), callers, "hot", 100*time.Millisecond)
			require.NoError(t, err)
		}
		require.LessOrEqual(t, s[rate], 1000*float64(callers), "each call takes a millisecond")
	}
	_, err = e.run(t.Context(), 3, "uniform", time.Millisecond)
	require.ErrorContains(t, err, errDenied.Error(), "a process tells what went wrong")
}

func TestElsewhere_Obeys(*testing.T) {
	if flag.Arg(0) != "obey" {
		return
	}
	_ = obey(context.Background(), func(_ context.Context, key string) error {
		if key != hotKey {
			return errDenied
		}
		time.Sleep(time.Millisecond)
		return nil
	})
	os.Exit(0)
}

// Not how much later it comes: that is the machine's affair.
func TestLatency_IsNeverLessAndChangesNothing(t *testing.T) {
	t.Parallel()
	listener := kit.NoError(net.Listen("unix", filepath.Join(t.TempDir(), "s")))(t)
	defer listener.Close()
	const added = 4 * time.Millisecond
	client := kit.NoError(latency(added).dial(t.Context(), "unix", listener.Addr().String()))(t)
	server := kit.NoError(listener.Accept())(t)

	for _, way := range []struct{ from, to net.Conn }{{client, server}, {server, client}} {
		message := []byte(strings.Repeat("0123456", 50_000)) // more than a piece
		begin, received := time.Now(), make([]byte, len(message))
		go func() { _, _ = way.from.Write(message) }()
		_, err := io.ReadFull(way.to, received)
		require.NoError(t, err)
		require.GreaterOrEqual(t, time.Since(begin), added/2, "half of it each way")
		require.Equal(t, message, received)
	}
	server.Close()
	_, err := client.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
}

func newRedis(t *testing.T) *redisServer {
	if _, err := pgtest.Program(t.Context(), "redis-server"); err != nil {
		t.Skip(err)
	}
	server := startRedis(t.Context(), false)
	t.Cleanup(func() { require.NoError(t, server.close()) })
	return server
}

// Each bucket gains a token in an hour, and the answers have times in whole hours, rounded up. Redis runs one script at a time, so
// callers beside each other are as callers in turn.
func TestScript_TakesFromAllBucketsOrFromNone(t *testing.T) {
	t.Parallel()
	const gain = int64(time.Hour / time.Microsecond)
	type bucket struct {
		key            string
		capacity, cost int
	}
	server := newRedis(t)
	user, organisation, all := bucket{"user", 5, 1}, bucket{"organisation", 3, 1}, bucket{"all", 10, 2}
	ask := func(want []int64, buckets ...bucket) {
		t.Helper()
		var (
			keys []string
			args []any
		)
		for _, b := range buckets {
			keys, args = append(keys, b.key), append(args, b.capacity, gain, b.cost)
		}
		answer := kit.NoError(acquireAllScript.Run(t.Context(), server, keys, args...).Int64Slice())(t)
		for i := range buckets {
			for _, n := range []int{3*i + 2, 3*i + 3} {
				answer[n] = (answer[n] + gain - 1) / gain
			}
		}
		require.Equal(t, want, answer)
	}
	ask([]int64{1, 4, 0, 1, 2, 0, 1, 8, 0, 2}, user, organisation, all)
	ask([]int64{1, 3, 0, 2, 1, 0, 2, 6, 0, 4}, user, organisation, all)
	ask([]int64{1, 2, 0, 3, 0, 0, 3, 4, 0, 6}, user, organisation, all)
	for range 3 {
		ask([]int64{0, 2, 0, 3, 0, 1, 3, 4, 0, 6}, user, organisation, all)
	}
	ask([]int64{1, 1, 0, 4, 2, 0, 8}, user, all)
	ask([]int64{0, 1, 0, 4, 2, 1, 8}, user, bucket{"all", 10, 3})
	ask([]int64{0, 1, 9, 4}, bucket{"user", 5, 10})

	pass := func(d time.Duration) { // what is stored is moved to an earlier time, instead of waiting
		require.NoError(t, server.IncrBy(t.Context(), "user", -d.Microseconds()).Err())
	}
	ask([]int64{1, 0, 0, 5}, user)
	pass(50 * time.Minute)
	ask([]int64{0, 0, 1, 5}, user)
	pass(11 * time.Minute)
	ask([]int64{1, 0, 0, 5}, user)
	pass(9 * time.Hour)
	ask([]int64{1, 4, 0, 1}, user)
	require.Positive(t, server.PTTL(t.Context(), "user").Val())
	require.LessOrEqual(t, server.PTTL(t.Context(), "user").Val(), time.Hour)
}

func TestHoldScript_LendsTheSlotsOfAKeyUntilLeasesEnd(t *testing.T) {
	t.Parallel()
	server := newRedis(t)
	hold := func(want error, holder string) {
		t.Helper()
		require.Equal(t, want, isAllowed(holdScript.Run(t.Context(), server, []string{"key"}, holder, 2, time.Hour.Microseconds())))
	}
	hold(nil, "a")
	hold(nil, "b")
	hold(errDenied, "c")
	hold(nil, "a") // a holder begins its lease anew
	require.EqualValues(t, 2, server.ZCard(t.Context(), "key").Val())

	require.NoError(t, server.ZIncrBy(t.Context(), "key", -float64(time.Hour.Microseconds()), "b").Err()) // instead of waiting
	hold(nil, "c")                                                                                        // the lease of b has ended
	hold(errDenied, "b")
	require.EqualValues(t, 1, server.ZRem(t.Context(), "key", "a").Val())
	hold(nil, "b")
	require.Positive(t, server.PTTL(t.Context(), "key").Val())
	require.LessOrEqual(t, server.PTTL(t.Context(), "key").Val(), time.Hour)
}

// A denial must not count as a cycle: the slots are taken, and released.
func TestHeld_FailsWithoutAFreeSlotAndKeepsNone(t *testing.T) {
	t.Parallel()
	db, server := pgtest.New(t), newRedis(t)
	for _, sql := range append(defineSlots(), "select ratelimit_hold('slots', 'hot', 'all', 1000)") {
		db.Exec(t, sql)
	}
	for i := range slotCapacity {
		require.NoError(t, server.ZAdd(t.Context(), "slots:hot", redis.Z{Score: 1e18, Member: i}).Err())
	}
	ways := []acquirer{held(client.New(db.Pool)), heldRedis(server)}
	for _, way := range ways {
		require.ErrorIs(t, way(t.Context(), "hot"), errDenied)
	}
	db.Exec(t, "select ratelimit_release('slots', 'hot', 'all')")
	require.NoError(t, server.Del(t.Context(), "slots:hot").Err())
	for _, way := range ways {
		require.NoError(t, way(t.Context(), "hot"))
	}
	require.Zero(t, kit.One[int](t, db.Pool, "select count(*) from ratelimit.leases"))
	require.Zero(t, server.ZCard(t.Context(), "slots:hot").Val())
}
