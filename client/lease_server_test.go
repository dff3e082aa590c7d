package client_test

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// A ledger is the pool of a Leaser, and writes down what the server has charged to leases before the Leaser learns of it, and what
// is given back before the server does.
type ledger struct {
	*pgxpool.Pool
	t       testing.TB
	mu      sync.Mutex
	held    map[string]int64 // by key: charged, neither granted nor given back
	charges int
}

type chargeRow struct {
	pgx.Row
	ledger *ledger
	key    string
}

func (l *ledger) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	switch {
	case strings.Contains(sql, "ratelimit_acquire_up_to("):
		return chargeRow{l.Pool.QueryRow(ctx, sql, args...), l, args[1].(string)}
	case strings.Contains(sql, "ratelimit_refund("):
		l.spend(args[1].(string), args[2].(int64))
	}
	return l.Pool.QueryRow(ctx, sql, args...)
}

func (r chargeRow) Scan(dest ...any) error {
	err := r.Row.Scan(dest...)
	if err == nil {
		r.ledger.mu.Lock()
		defer r.ledger.mu.Unlock()
		r.ledger.held[r.key] += *dest[len(dest)-1].(*int64)
		r.ledger.charges++
	}
	return err
}

// spend is called for what was granted or is given back: it must have been charged before.
func (l *ledger) spend(key string, tokens int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held[key] -= tokens; l.held[key] < 0 {
		l.t.Errorf("%d tokens of %s that were not charged before", -l.held[key], key)
	}
}

// Each grant of a lease belongs to a charge that the server has answered before, whatever happens to connections meanwhile. And
// what the server has charged is what was granted, but for what lost calls took.
func TestLeaser_EveryGrantBelongsToAChargeBeforeIt(t *testing.T) {
	t.Parallel()
	for _, killing := range []bool{false, true} {
		t.Run(fmt.Sprint("killing=", killing), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			const capacity = 1_000_000
			db.Exec(t, fmt.Sprintf("select ratelimit_define_policy('api', %d, 1, '1 day')", capacity))
			books := &ledger{Pool: db.Pool, t: t, held: map[string]int64{}}
			leaser := client.NewLeaser(books, client.Lease{Policy: "api", Idle: 50 * time.Millisecond})
			keys := []string{"a", "b", "c"}
			granted := make(map[string]*atomic.Int64)
			for _, key := range keys {
				granted[key] = new(atomic.Int64)
			}
			var leased, unknown atomic.Int64
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			var callers sync.WaitGroup
			for caller := range 16 {
				callers.Go(func() {
					random := rand.New(rand.NewPCG(1, uint64(caller)))
					for n := 0; ctx.Err() == nil; n++ {
						key, cost := keys[random.IntN(len(keys))], random.Int64N(5)+1
						d, err := leaser.Acquire(t.Context(), "api", key, client.Cost(cost))
						switch {
						case err != nil:
							unknown.Add(cost)
							continue
						case !d.Allowed:
							continue
						case d.Estimated:
							leased.Add(1)
							books.spend(key, cost)
						}
						granted[key].Add(cost)
						if random.IntN(2000) == 0 {
							time.Sleep(time.Duration(random.IntN(150)) * time.Millisecond) // now and then all are idle
						} else if random.IntN(20) == 0 {
							time.Sleep(100 * time.Microsecond)
						}
					}
				})
			}
			killer := db.Connect(t)
			const enough = 1000
			last := int64(0)
			for begin := time.Now(); time.Since(begin) < 3*time.Second || leased.Load() < enough && time.Since(begin) < time.Minute; {
				time.Sleep(20 * time.Millisecond)
				if !killing || leased.Load() == last { // it comes again when there were grants
					continue
				}
				last = leased.Load()
				_, err := killer.Exec(t.Context(), `select pg_terminate_backend(pid) from pg_stat_activity
					where datname = current_database() and pid <> pg_backend_pid() and query like '%ratelimit_%' order by random() limit 1`)
				require.NoError(t, err)
			}
			stop()
			callers.Wait()
			leaser.Close()

			require.GreaterOrEqual(t, leased.Load(), int64(enough))
			require.Greater(t, books.charges, 3)
			limiter := client.New(db.Pool)
			for _, key := range keys {
				d, err := limiter.Peek(t.Context(), "api", key)
				require.NoError(t, err)
				lost := capacity - d.Remaining - granted[key].Load()
				require.GreaterOrEqual(t, lost, int64(0), "granted, and not charged")
				if !killing {
					require.Zero(t, lost)
					require.Zero(t, books.held[key], "all was given back")
				}
			}
		})
	}
}

// asLeaser is set for a process of this test binary that is a Leaser: see leaserProcess.
const asLeaser = "RATELIMIT_TEST_AS_LEASER"

// leaserProcess asks for tokens until its standard input says to idle or ends. What it was granted it counts in a file, which
// outlives it. Of its callers each asks again after the pause, or after a denial when that says.
func leaserProcess() error {
	var callers int
	var pause time.Duration
	var url, policy, file string
	_, err := fmt.Sscan(os.Getenv(asLeaser), &callers, (*int64)(&pause), &policy, &file, &url)
	if err != nil {
		return err
	}
	count, err := countIn(file)
	if err != nil {
		return err
	}
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	leaser := client.NewLeaser(pool, client.Lease{Policy: policy})
	defer leaser.Close()
	asking, stop := context.WithCancel(ctx)
	var running sync.WaitGroup
	for range callers {
		running.Go(func() {
			for asking.Err() == nil {
				d, err := leaser.Acquire(ctx, policy, "hot")
				switch {
				case err != nil:
					fmt.Fprintln(os.Stderr, err)
					return
				case d.Allowed:
					count.Add(1)
					time.Sleep(pause)
				default:
					time.Sleep(min(max(d.RetryAfter, time.Millisecond), 5*time.Millisecond))
				}
			}
		})
	}
	orders := bufio.NewReader(os.Stdin)
	_, err = orders.ReadString('\n')
	stop()
	running.Wait()
	if err == nil { // to idle
		fmt.Println("idle")
		_, _ = orders.ReadString('\n')
	}
	return nil
}

// countIn is a number in a file that several processes have in memory.
func countIn(file string) (*atomic.Int64, error) {
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	size := binary.Size(int64(0))
	if err := f.Truncate(int64(size)); err != nil {
		return nil, err
	}
	memory, err := syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return (*atomic.Int64)(unsafe.Pointer(&memory[0])), nil
}

// A leaserOfTest is such a process.
type leaserOfTest struct {
	t       *testing.T
	cmd     *exec.Cmd
	orders  io.WriteCloser
	answers *bufio.Reader
	granted *atomic.Int64
}

func startLeaser(t *testing.T, db *pgtest.DB, policy string, callers int, pause time.Duration) *leaserOfTest {
	file := filepath.Join(t.TempDir(), "granted")
	granted, err := countIn(file)
	require.NoError(t, err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %d %s %s %s", asLeaser, callers, pause, policy, file, db.URL))
	cmd.Stderr = os.Stderr
	orders, err := cmd.StdinPipe()
	require.NoError(t, err)
	answers, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	l := &leaserOfTest{t, cmd, orders, bufio.NewReader(answers), granted}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return l
}

// idle returns when it asks no more.
func (l *leaserOfTest) idle() {
	_, err := fmt.Fprintln(l.orders, "idle")
	require.NoError(l.t, err)
	answer, err := l.answers.ReadString('\n')
	require.NoError(l.t, err)
	require.Equal(l.t, "idle\n", answer)
}

func (l *leaserOfTest) kill() {
	require.NoError(l.t, l.cmd.Process.Kill())
	_ = l.cmd.Wait()
}

func (l *leaserOfTest) close() {
	require.NoError(l.t, l.orders.Close())
	require.NoError(l.t, l.cmd.Wait())
}

// Four processes want more than a bucket gains; then one is killed, and one is idle. They never get more than there is, and get
// nearly all of it: RATELIMIT_TEST_LEASER_SECONDS is for a longer run, which asks for that, too.
func TestLeaser_ProcessesShareABucket(t *testing.T) {
	db := pgtest.New(t)
	const capacity, perSecond = 10_000, 10_000
	db.Exec(t, fmt.Sprintf("select ratelimit_define_policy('api', %d, %d, '1 second')", capacity, perSecond))
	longer := os.Getenv("RATELIMIT_TEST_LEASER_SECONDS")
	seconds, err := strconv.Atoi(cmp.Or(longer, "6"))
	require.NoError(t, err)
	half := time.Duration(seconds) * time.Second / 2

	var processes []*leaserOfTest
	granted := func() (sum int64) {
		for _, l := range processes {
			sum += l.granted.Load()
		}
		return sum
	}
	began := clockOf(t, db)
	for range 4 {
		processes = append(processes, startLeaser(t, db, "api", 16, 500*time.Microsecond))
	}
	db.Await(t, 10*time.Second, "select (ratelimit_peek('api', 'hot')).remaining < 100")
	share := func(what string, during func()) float64 {
		before, begin := granted(), clockOf(t, db)
		during()
		took := clockOf(t, db).Sub(begin).Seconds()
		part := float64(granted()-before) / (perSecond * took)
		t.Logf("%s: %.1f %% of what the bucket gains", what, 100*part)
		return part
	}
	first := share("four processes", func() { time.Sleep(half) })
	second := share("one killed, one idle", func() {
		processes[0].kill()
		processes[1].idle()
		time.Sleep(half)
	})
	for _, l := range processes[1:] {
		l.close()
	}
	if longer != "" { // a machine that has other work to do might not get to it
		require.Greater(t, first, 0.97)
		require.Greater(t, second, 0.97-0.1/half.Seconds(), "a killed process has lost a tenth of the capacity at most")
	}
	require.LessOrEqual(t, float64(granted()), capacity+perSecond*clockOf(t, db).Sub(began).Seconds())
}

func clockOf(t *testing.T, db *pgtest.DB) (now time.Time) {
	require.NoError(t, db.Pool.QueryRow(t.Context(), "select clock_timestamp()").Scan(&now))
	return now
}

// By the server's own ledger, a killed process has lost no more than its lease, and an idle one gives back all of it.
func TestLeaser_AKilledProcessLosesItsLeaseAtMost(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	const capacity = 100_000
	db.Exec(t, fmt.Sprintf("select ratelimit_define_policy('api', %d, 1, '1 day')", capacity))
	charged := func() int64 {
		d, err := client.New(db.Pool).Peek(t.Context(), "api", "hot")
		require.NoError(t, err)
		return capacity - d.Remaining
	}
	one := startLeaser(t, db, "api", 8, 2*time.Millisecond)
	two := startLeaser(t, db, "api", 8, 2*time.Millisecond)
	db.Await(t, 20*time.Second, "select (ratelimit_peek('api', 'hot')).remaining < 95000")

	two.idle()
	one.kill()
	lost := func() int64 { return charged() - one.granted.Load() - two.granted.Load() }
	atOnce := lost()
	lostByKill := atOnce
	for changed := time.Now(); time.Since(changed) < time.Second; time.Sleep(20 * time.Millisecond) {
		if now := lost(); now != lostByKill {
			lostByKill, changed = now, time.Now()
		}
	}
	t.Logf("held by two processes: %d tokens, and then: %d", atOnce, lostByKill)
	require.GreaterOrEqual(t, lostByKill, int64(0))
	require.Less(t, lostByKill, atOnce)
	two.close()
	require.Equal(t, lostByKill, lost(), "the idle one had nothing left")
	require.LessOrEqual(t, lostByKill, int64(capacity/10))
}

// One caller asks a hundred times as often as another: what the other gets, with leases and without.
func TestLeaser_WhoAsksOftenDoesNotStarveOthers(t *testing.T) {
	db := pgtest.New(t)
	const rareEvery = 20 * time.Millisecond
	shares := map[bool]float64{}
	for _, withLeases := range []bool{false, true} {
		policy := fmt.Sprint("leases-", withLeases)
		db.Exec(t, fmt.Sprintf("select ratelimit_define_policy('%s', 1000, 1000, '1 second')", policy))
		acquirer := func() (client.Acquirer, func()) {
			pool, err := pgxpool.New(t.Context(), db.URL)
			require.NoError(t, err)
			var opts []client.LeaserOption
			if withLeases {
				opts = append(opts, client.Lease{Policy: policy})
			}
			l := client.NewLeaser(pool, opts...)
			return l, func() { l.Close(); pool.Close() }
		}
		often, closeOften := acquirer()
		rare, closeRare := acquirer()
		ctx, stop := context.WithTimeout(t.Context(), 5*time.Second)
		var callers sync.WaitGroup
		var oftenGranted, oftenAsked atomic.Int64
		for range 16 {
			callers.Go(func() {
				for ctx.Err() == nil { // 5,000 a second if time lets them: five times what there is
					d, err := often.Acquire(t.Context(), policy, "hot")
					if err != nil {
						t.Error(err)
						return
					}
					oftenAsked.Add(1)
					if d.Allowed {
						oftenGranted.Add(1)
					}
					time.Sleep(16 * time.Second / 5000)
				}
			})
		}
		db.Await(t, 20*time.Second, fmt.Sprintf("select (ratelimit_peek('%s', 'hot')).remaining < 100", policy))
		asked, granted := 0, 0
		var took time.Duration
		for ctx.Err() == nil {
			begin := time.Now()
			d, err := rare.Acquire(t.Context(), policy, "hot")
			took += time.Since(begin)
			require.NoError(t, err)
			asked++
			if d.Allowed {
				granted++
			}
			time.Sleep(rareEvery)
		}
		stop()
		callers.Wait()
		closeOften()
		closeRare()
		shares[withLeases] = float64(granted) / float64(asked)
		t.Logf("leases %v: the rare one got %d of %d (%.0f %%), each in %v; the other %d of %d (%.0f %%)", withLeases,
			granted, asked, 100*shares[withLeases], (took / time.Duration(asked)).Round(time.Microsecond),
			oftenGranted.Load(), oftenAsked.Load(), 100*float64(oftenGranted.Load())/float64(oftenAsked.Load()))
	}
	if os.Getenv("RATELIMIT_TEST_LEASER_SECONDS") != "" {
		require.Greater(t, shares[true], 0.6*shares[false])
	}
	require.Positive(t, shares[true])
}

// A grant from a lease allocates nothing.
func TestLeaser_AllocatesNothing(t *testing.T) {
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('api', 10000000, 10000, '1 day')")
	leaser := client.NewLeaser(db.Pool, client.Lease{Policy: "api"})
	defer leaser.Close()
	leased := func() bool {
		d, err := leaser.Acquire(t.Context(), "api", "hot")
		require.NoError(t, err)
		return d.Estimated
	}
	for begin := time.Now(); !leased(); {
		require.Less(t, time.Since(begin), 10*time.Second)
	}
	ctx := t.Context()
	var failed error
	allocated := testing.AllocsPerRun(1000, func() {
		if _, err := leaser.Acquire(ctx, "api", "hot"); err != nil {
			failed = errors.Join(failed, err)
		}
	})
	require.NoError(t, failed)
	require.Less(t, allocated, 1.0, "but for refills")
}
