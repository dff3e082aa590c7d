package tests

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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
)

// keepBooks has the server write down what each session takes from buckets and gives back, by its application_name: from the
// rows of buckets as they change, and not from what functions answer.
func keepBooks(db *testDB) {
	db.exec(`
		create table public.books (n bigint generated always as identity, who text not null, at timestamptz not null, refilled_at timestamptz not null, charged numeric not null);
		create function public.keep_books() returns trigger language plpgsql set search_path = pg_catalog, pg_temp as $$
		declare
		  v_policy ratelimit.policies;
		  v_level  numeric;
		begin
		  select * into strict v_policy from ratelimit.policies where id = new.policy_id;
		  v_level := v_policy.full_level;
		  if tg_op = 'UPDATE' then
		    v_level := least(v_level, old.level + floor(
		      extract(epoch from new.refilled_at - old.refilled_at) * 1000000.0 * v_policy.refill * 1000000.0 / v_policy.every_us));
		  end if;
		  insert into public.books (who, at, refilled_at, charged)
		  values (current_setting('application_name'), clock_timestamp(), new.refilled_at, (v_level - new.level) / 1000000.0);
		  return null;
		end $$;
		create trigger keep_books after insert or update on ratelimit.buckets for each row execute function public.keep_books()`)
}

// charged is how many tokens the sessions of a name have taken, less what they gave back.
func charged(db *testDB, who string) (tokens int64) {
	return db.number("select coalesce(sum(charged), 0)::bigint from public.books where who = $1", who)
}

// Of leases, a leaseHistory has what is charged to them, granted from them and given back, in an order that is safe: a charge is
// written down before its Leaser hears of it, what is given back before the server does, and a grant after its caller has it.
type leaseHistory struct {
	mu     sync.Mutex
	events []leaseEvent
}

type leaseEvent struct {
	leaser, key string
	kind        string // "charge", "grant" or "give back"
	tokens      int64
}

func (h *leaseHistory) add(e leaseEvent) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, e)
}

// audit finds the first token that was granted or given back without a charge before it.
func (h *leaseHistory) audit() error {
	type lease struct{ leaser, key string }
	held := map[lease]int64{}
	for n, e := range h.events {
		of := lease{e.leaser, e.key}
		if e.kind == "charge" {
			held[of] += e.tokens
			continue
		}
		if held[of] -= e.tokens; held[of] < 0 {
			return fmt.Errorf("event %d of %d: %s has %d tokens of %s for a %s that were not charged before",
				n, len(h.events), e.leaser, -held[of], e.key, e.kind)
		}
	}
	return nil
}

// A patientPool has every call answered: of one that is given up after a second, the server may have charged what nobody gets.
type patientPool struct{ *pgxpool.Pool }

func (p patientPool) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return p.Pool.QueryRow(context.WithoutCancel(ctx), sql, args...)
}

// A recordingPool is the pool of a Leaser, and writes a history.
type recordingPool struct {
	patientPool
	leaser  string
	history *leaseHistory
	bug     leaseBug
	late    sync.WaitGroup // what a bug has put off
	over    chan struct{}  // until this is closed
}

// A leaseBug is planted, for the audit to find. It makes the Leaser do what it must not.
type leaseBug string

const (
	grantsOneMore  leaseBug = "a lease grants one more than was charged"
	grantsTooEarly leaseBug = "a lease grants before the charge was answered"
	givesBackTwice leaseBug = "a lease gives back twice"
)

func (p *recordingPool) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	switch {
	case strings.Contains(sql, "ratelimit_acquire_up_to("):
		return &chargeRow{ctx: ctx, pool: p, sql: sql, args: args}
	case strings.Contains(sql, "ratelimit_refund("):
		p.history.add(leaseEvent{p.leaser, args[1].(string), "give back", args[2].(int64)})
		if p.bug == givesBackTwice {
			_ = p.patientPool.QueryRow(ctx, sql, args...).Scan(make([]any, 7)...)
		}
	}
	return p.patientPool.QueryRow(ctx, sql, args...)
}

type chargeRow struct {
	ctx  context.Context
	pool *recordingPool
	sql  string
	args []any
}

// Scan makes the call. The last column is what was taken.
func (r *chargeRow) Scan(dest ...any) error {
	p, taken := r.pool, dest[len(dest)-1].(*int64)
	call := func(by client.Querier) error { return by.QueryRow(r.ctx, r.sql, r.args...).Scan(dest...) }
	write := func(tokens int64) { p.history.add(leaseEvent{p.leaser, r.args[1].(string), "charge", tokens}) }
	if p.bug == grantsTooEarly { // the answer is that of a transaction which is not committed, and the charge follows
		tx, err := p.Begin(r.ctx)
		if err != nil {
			return err
		}
		err = errors.Join(call(tx), tx.Rollback(r.ctx))
		p.late.Go(func() {
			<-p.over
			var tokens int64
			late := make([]any, len(dest))
			late[len(late)-1] = &tokens
			if p.Pool.QueryRow(context.Background(), r.sql, r.args...).Scan(late...) == nil {
				write(tokens)
			}
		})
		return err
	}
	err := call(p.patientPool)
	if err == nil {
		write(*taken)
		if p.bug == grantsOneMore {
			*taken++
		}
	}
	return err
}

// asLeaser is set for a process of this test binary that is a Leaser.
const asLeaser = "RATELIMIT_TEST_AS_LEASER"

// A leaserProcess asks for tokens of the key hot.
type leaserProcess struct {
	URL, Name, Policy string
	File              string // has its counts, and outlives it
	Leases            bool   // else it is a Combiner
	Callers           int
	Every             time.Duration // each caller asks
	Idle              time.Duration

	cmd     *exec.Cmd
	orders  io.WriteCloser
	answers *bufio.Reader
	*counts
}

// be is what the process does: it asks until its standard input says to idle or ends.
func (p leaserProcess) be() error {
	counts, err := countsIn(p.File)
	if err != nil {
		return err
	}
	ctx := context.Background()
	config, err := pgxpool.ParseConfig(p.URL)
	if err != nil {
		return err
	}
	config.ConnConfig.RuntimeParams["application_name"] = p.Name
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	var opts []client.Option
	if p.Leases {
		opts = append(opts, client.Lease{Policy: p.Policy, Idle: p.Idle})
	}
	leaser := client.NewLeaser(patientPool{pool}, opts...)
	defer leaser.Close()
	asking, stop := context.WithCancel(ctx)
	var callers sync.WaitGroup
	errs := make(chan error, p.Callers)
	for range p.Callers {
		callers.Go(func() {
			for asking.Err() == nil {
				begin := time.Now()
				d, err := leaser.Acquire(ctx, p.Policy, "hot")
				if err != nil {
					errs <- err
					return
				}
				counts.asked.Add(1)
				if d.Allowed {
					counts.granted.Add(1)
				}
				time.Sleep(max(p.Every, min(d.RetryAfter, 5*time.Millisecond)) - time.Since(begin))
			}
		})
	}
	orders := bufio.NewReader(os.Stdin)
	_, end := orders.ReadString('\n')
	stop()
	callers.Wait()
	if end == nil {
		fmt.Println("idle")
		_, _ = orders.ReadString('\n')
	}
	close(errs)
	for e := range errs {
		err = errors.Join(err, e)
	}
	return err
}

// beLeaser reports whether this process was one, and is done.
func beLeaser() bool {
	text := os.Getenv(asLeaser)
	if text == "" {
		return false
	}
	var p leaserProcess
	err := json.Unmarshal([]byte(text), &p)
	if err = errors.Join(err, p.be()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return true
}

// counts are of requests.
type counts struct{ asked, granted atomic.Int64 }

// countsIn are in a file that several processes have in memory.
func countsIn(file string) (*counts, error) {
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	size := int(unsafe.Sizeof(counts{}))
	if err := f.Truncate(int64(size)); err != nil {
		return nil, err
	}
	memory, err := syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return (*counts)(unsafe.Pointer(&memory[0])), nil
}

// start starts the process.
func (p *leaserProcess) start(t *testing.T, db *testDB) *leaserProcess {
	p.URL, p.File = db.URL, filepath.Join(t.TempDir(), "granted")
	var err error
	p.counts, err = countsIn(p.File)
	require.NoError(t, err)
	text, err := json.Marshal(p)
	require.NoError(t, err)
	p.cmd = exec.Command(os.Args[0])
	p.cmd.Env = append(os.Environ(), asLeaser+"="+string(text))
	p.cmd.Stderr = os.Stderr
	p.orders, err = p.cmd.StdinPipe()
	require.NoError(t, err)
	answers, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	p.answers = bufio.NewReader(answers)
	require.NoError(t, p.cmd.Start())
	t.Cleanup(func() { _ = p.cmd.Process.Kill() })
	return p
}

// idle returns when it asks no more.
func (p *leaserProcess) idle(t *testing.T) {
	require.NoError(t, errorOf(fmt.Fprintln(p.orders, "idle")))
	answer, err := p.answers.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "idle\n", answer)
}

// holds stops it, and reports whether it lost something now. If not, it goes on.
func (p *leaserProcess) holds(t *testing.T, lost func(p *leaserProcess) int64) bool {
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGSTOP))
	if lost(p) > 0 {
		return true
	}
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGCONT))
	return false
}

// kill ends it at once, by SIGKILL.
func (p *leaserProcess) kill(t *testing.T) {
	require.NoError(t, p.cmd.Process.Kill())
	_ = p.cmd.Wait()
}

// close returns when it has ended, and has given back what it held.
func (p *leaserProcess) close(t *testing.T) {
	require.NoError(t, p.orders.Close())
	require.NoError(t, p.cmd.Wait())
}

// waitsUntilGranted are how long requests had to wait for their tokens.
type waitsUntilGranted []time.Duration

func (w waitsUntilGranted) quantile(q float64) time.Duration {
	sorted := slices.Clone(w)
	slices.Sort(sorted)
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))].Round(10 * time.Microsecond)
}

func (db *testDB) now() time.Time {
	var now time.Time
	require.NoError(db.t, db.Pool.QueryRow(context.Background(), "select clock_timestamp()").Scan(&now))
	return now
}
