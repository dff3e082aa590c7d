// Package outgoing runs processes that share the buckets of one upstream, and judges what the upstream has seen.
package outgoing

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"sort"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/outgoing"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// The limits of the upstream, and the capacities of the buckets that keep them: half of what the upstream takes at once.
const (
	perSecond, perMinute = 50, 10_000
	requests, tokens     = 25, 500
)

// An upstream has two token buckets on its own clock. Now and then it refuses everything for some seconds, although they are not empty.
// A refusal is 429 with Retry-After, and lasts as long as that says.
type upstream struct {
	began          time.Time
	longest        int           // of the planted pauses, in seconds
	gap            time.Duration // between two, from half of it to the whole
	random         *rand.Rand
	mu             sync.Mutex
	level          [2]float64 // of requests and tokens
	levelAt, plant time.Duration
	processes      map[string]bool
	allSeen        chan struct{} // closed when all processes have sent something
	arrivals       []arrival
	pauses         []pause
}

type arrival struct {
	at     time.Duration
	asked  int64 // when the sender asked for its tokens: microseconds of the clock that all processes have
	tokens int64 // 0: refused
}

type pause struct {
	from, to  time.Duration
	planted   bool
	committed int64 // as asked; 0: not yet
}

func (u *upstream) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	number := func(name string) int64 { n, _ := strconv.ParseInt(r.FormValue(name), 10, 64); return n }
	u.mu.Lock()
	defer u.mu.Unlock()
	at := time.Since(u.began)
	open := &pause{}
	if len(u.pauses) > 0 {
		open = &u.pauses[len(u.pauses)-1]
	}
	if r.URL.Path == "/paused" {
		if open.committed == 0 {
			open.committed = number("at")
		}
		return
	}
	if name := r.FormValue("process"); !u.processes[name] {
		u.processes[name] = true
		if len(u.processes) == 3 {
			u.plant = at + u.gap
			close(u.allSeen)
		}
	}
	a := arrival{at: at, asked: number("asked"), tokens: number("tokens")}
	costs, wait := [2]float64{1, float64(a.tokens)}, 0.0
	for i, rate := range [2]float64{perSecond, perMinute / 60.0} {
		u.level[i] = min([2]float64{2 * requests, 2 * tokens}[i], u.level[i]+rate*(at-u.levelAt).Seconds())
		wait = max(wait, (costs[i]-u.level[i])/rate)
	}
	u.levelAt = at
	if planted := u.plant > 0 && at >= u.plant; at >= open.to && (planted || wait > 0) {
		length := time.Duration(math.Ceil(wait)) * time.Second
		if planted {
			length = time.Duration(1+u.random.IntN(u.longest)) * time.Second
		}
		u.pauses = append(u.pauses, pause{from: at, to: at + length, planted: planted})
		open = &u.pauses[len(u.pauses)-1]
		u.plant = at + length + u.gap/2 + time.Duration(u.random.Int64N(int64(u.gap/2)))
	}
	if at < open.to {
		a.tokens = 0
		w.Header().Set("Retry-After", fmt.Sprint(math.Ceil((open.to - at).Seconds())))
		w.WriteHeader(http.StatusTooManyRequests)
	} else {
		u.level[0], u.level[1] = u.level[0]-costs[0], u.level[1]-costs[1]
		w.Header().Set("Used", fmt.Sprint(a.tokens))
	}
	u.arrivals = append(u.arrivals, a)
}

// A verdict counts faults, and what else there was.
type verdict struct {
	early     int // requests whose tokens were asked for during a pause, and that came before its end
	herd      int // requests in the second after a pause that were more than its refill
	unplanned int // refusals because a bucket of the upstream was empty
	inFlight  int // requests whose tokens were asked for before the pause, and that came in it
	planted   int
	accepted  [2]int64 // requests and tokens
	lasted    time.Duration
	open      time.Duration // the time without pauses
	saved     time.Duration // the time in pauses until the bucket of tokens is full, which goes on to refill
}

// judge judges what came from an instant on.
func (u *upstream) judge(from time.Duration) (v verdict) {
	u.mu.Lock()
	defer u.mu.Unlock()
	now := time.Since(u.began)
	v.lasted, v.open = now-from, now-from
	for _, p := range u.pauses {
		if p.committed == 0 && now > p.to {
			v.early++ // no process has learnt of it
		}
		in := max(0, min(now, p.to)-max(from, p.from))
		v.open -= in
		if v.saved += min(in, tokens*time.Minute/perMinute); p.planted {
			v.planted++
		} else {
			v.unplanned++
		}
		first := sort.Search(len(u.arrivals), func(i int) bool { return u.arrivals[i].at > p.from })
		after := 0
		for _, a := range u.arrivals[first:] {
			since := a.at - p.to
			if since >= time.Second {
				break
			}
			switch {
			case since >= 0:
				if after++; float64(after) > 1+perSecond*since.Seconds() {
					v.herd++
				}
			case p.committed > 0 && a.asked > p.committed:
				v.early++
			default:
				v.inFlight++
			}
		}
	}
	for _, a := range u.arrivals {
		if a.tokens > 0 && a.at >= from {
			v.accepted[0]++
			v.accepted[1] += a.tokens
		}
	}
	return v
}

// newUpstream returns a client that waits for a request, and for the tokens that it is estimated to use.
func newUpstream(limiter outgoing.Limiter, opts ...outgoing.Option) *http.Client {
	return &http.Client{Transport: outgoing.New(limiter, func(r *http.Request) []client.Charge {
		estimate, _ := r.Context().Value(estimated{}).(int64)
		return []client.Charge{
			{Policy: "requests", Key: "account"},
			{Policy: "tokens", Key: "account", Cost: client.Cost(estimate)},
		}
	}, opts...)}
}

type estimated struct{} // the key of the estimate in the context

// A process sends requests, each caller one after another.
type process struct {
	Name, DB, Upstream, Plant string
	Fewest, Most              int64
}

const (
	asProcess = "RATELIMIT_TEST_OUTGOING"
	callers   = 10
)

func (p process) be() error {
	ctx, stop := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	pool, err := pgxpool.New(ctx, p.DB)
	if err != nil {
		return err
	}
	defer pool.Close()
	limiter := client.New(pool)
	upstream := newUpstream(planted{limiter, p}, outgoing.Base(stamping{}))
	var running errgroup.Group
	for range callers {
		running.Go(func() error {
			for ctx.Err() == nil {
				if err := p.call(ctx, limiter, upstream); err != nil && ctx.Err() == nil {
					return err
				}
			}
			return nil
		})
	}
	return running.Wait()
}

// call sends a request whose estimate is up to twice what it uses, and refunds the rest.
func (p process) call(ctx context.Context, limiter *client.Limiter, upstream *http.Client) error {
	use := p.Fewest + rand.Int64N(p.Most-p.Fewest+1)
	estimate := use + rand.Int64N(use+1)
	ctx = context.WithValue(context.WithValue(ctx, stamping{}, new(int64)), estimated{}, estimate)
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, fmt.Sprintf("%s?process=%s&tokens=%d", p.Upstream, p.Name, use), nil)
	if err != nil {
		return err
	}
	response, err := upstream.Do(r)
	if err != nil {
		return err
	}
	response.Body.Close()
	if used, err := strconv.ParseInt(response.Header.Get("Used"), 10, 64); err == nil {
		return kit.ErrorOf(limiter.Refund(ctx, "tokens", "account", estimate-used))
	}
	return nil
}

// planted tells the upstream when a pause is committed. It has the bug that the process is to have.
type planted struct {
	outgoing.Limiter
	process
}

func (l planted) AcquireAll(ctx context.Context, charges []client.Charge, opts ...client.CallOption) (client.JointDecision, error) {
	*ctx.Value(stamping{}).(*int64) = time.Now().UnixMicro()
	return l.Limiter.AcquireAll(ctx, charges, opts...)
}

func (l planted) Pause(ctx context.Context, policy, key string, pauseFor time.Duration) (d client.Decision, err error) {
	if l.Plant == "a pause that is too short" {
		pauseFor -= 100 * time.Millisecond
	}
	if l.Plant != "no pause" {
		d, err = l.Limiter.Pause(ctx, policy, key, pauseFor)
	}
	if l.Plant == "a herd" {
		time.AfterFunc(pauseFor, func() { _, _ = l.Refund(context.Background(), policy, key, requests) })
	}
	response, failure := http.Post(fmt.Sprint(l.Upstream, "/paused?at=", time.Now().UnixMicro()), "", nil)
	if failure == nil {
		response.Body.Close()
	}
	return d, errors.Join(err, failure)
}

// stamping sends when the tokens were asked for, and is the key of that in the context.
type stamping struct{}

func (stamping) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.URL.RawQuery += fmt.Sprint("&asked=", *r.Context().Value(stamping{}).(*int64))
	return http.DefaultTransport.RoundTrip(r)
}

func TestMain(m *testing.M) {
	text := os.Getenv(asProcess)
	if text == "" {
		pgtest.Main(kit.MWithFigures{M: m})
		return
	}
	var p process
	if err := errors.Join(json.Unmarshal([]byte(text), &p), p.be()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run runs three processes, the last of them in Node.js if node is set, until the verdict is good for something.
func run(t *testing.T, db *kit.TestDB, p process, node bool, longest int, gap time.Duration, until func(verdict) bool) (v verdict) {
	u := &upstream{began: time.Now(), longest: longest, gap: gap, random: rand.New(rand.NewPCG(kit.TestSeed(t), 0)),
		level: [2]float64{2 * requests, 2 * tokens}, processes: map[string]bool{}, allSeen: make(chan struct{})}
	server := httptest.NewServer(u)
	defer server.Close()
	for i := range 3 {
		p.Name, p.DB, p.Upstream = fmt.Sprint(i), db.URL, server.URL
		cmd := exec.Command(os.Args[0])
		if node && i == 2 {
			cmd = exec.Command("node", "process.mjs")
		}
		text := kit.NoError(json.Marshal(p))(t)
		cmd.Env = append(append(os.Environ(), asProcess+"="+string(text)), kit.PgVariables(t, db.URL)...)
		var stderr strings.Builder
		cmd.Stderr = &stderr
		stdin := kit.NoError(cmd.StdinPipe())(t)
		require.NoError(t, cmd.Start())
		t.Cleanup(func() { _ = cmd.Process.Kill() })
		defer func() {
			require.NoError(t, stdin.Close())
			require.NoError(t, cmd.Wait(), stderr.String())
		}()
	}
	select {
	case <-u.allSeen:
	case <-time.After(kit.Patience):
		t.Error("not all processes send requests")
		return v
	}
	for from := time.Since(u.began); ; time.Sleep(100 * time.Millisecond) {
		if v = u.judge(from); until(v) {
			return v
		}
	}
}

func newBuckets(t *testing.T, times int64) *kit.TestDB {
	return kit.NewDB(t).Policy("requests", times*requests, times*perSecond, time.Second).Policy("tokens", times*tokens, times*perMinute, time.Minute)
}

// RATELIMIT_TORTURE_MINUTES=10 gives each of the two so many minutes, and judges the throughput, too.
func TestTorture_OneAnswerStopsThreeProcesses(t *testing.T) {
	pgtest.OncePerServer(t)
	for binding, test := range []struct {
		name         string
		fewest, most int64 // tokens of a request
		node         bool
	}{{"requests bind", 1, 3, false}, {"tokens bind", 5, 15, true}} {
		t.Run(test.name, func(t *testing.T) {
			torture := kit.Torture(t, 0)
			if test.node {
				kit.NeedNode(t)
			}
			db, longest, gap, length := newBuckets(t, 1), 1, time.Second, 5*time.Second
			judged := torture.Budget >= time.Minute
			if judged {
				longest, gap, length = 5, 15*time.Second, torture.Budget
			}
			v := run(t, db, process{Fewest: test.fewest, Most: test.most}, test.node, longest, gap, func(v verdict) bool {
				torture.Progress("%+v", v)
				return v.lasted > length
			})
			could := []float64{perSecond * v.open.Seconds(), perMinute * (v.open + v.saved).Minutes()}[binding]
			share := float64(v.accepted[binding]-[]int64{requests, tokens}[binding]) / could // the bucket was full at first
			torture.Figures("requests", v.accepted[0], "tokens", v.accepted[1], "seconds without a pause", v.open.Seconds(), "planted pauses", v.planted, "other refusals", v.unplanned,
				"requests that a pause found in flight", v.inFlight, "share of what the upstream allows", fmt.Sprintf("%.3f", share))
			require.GreaterOrEqual(t, v.planted, 2)
			require.Zero(t, v.early, "requests before the end of a pause")
			require.Zero(t, v.herd, "requests after a pause, beyond the refill")
			if judged {
				require.GreaterOrEqual(t, share, 0.95)
				require.LessOrEqual(t, float64(v.unplanned), torture.Budget.Minutes())
			}
		})
	}
}

func TestOutgoing_FindsPlantedBugs(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	for plant, found := range map[string]func(verdict) int{
		"no pause":                  func(v verdict) int { return v.early },
		"a pause that is too short": func(v verdict) int { return v.early },
		"a herd":                    func(v verdict) int { return v.herd },
		"no limit":                  func(v verdict) int { return v.unplanned - 2 },
	} {
		t.Run(plant, func(t *testing.T) {
			t.Parallel()
			times := int64(1)
			if plant == "no limit" {
				times = 10
			}
			giveUp := time.Now().Add(kit.Patience)
			v := run(t, newBuckets(t, times), process{Plant: plant, Fewest: 1, Most: 3}, false, 1, time.Second,
				func(v verdict) bool { return found(v) > 0 || time.Now().After(giveUp) })
			require.Positive(t, found(v))
		})
	}
}

func TestOutgoing_ThePageShowsTheCodeThatIsTested(t *testing.T) {
	t.Parallel()
	page := string(kit.NoError(os.ReadFile("../../docs/outgoing.md"))(t))
	for tag, name := range map[string]string{"go": "outgoing_test.go", "text": "process.mjs"} {
		tested := string(kit.NoError(os.ReadFile(name))(t))
		_, block, found := strings.Cut(page, "```"+tag+"\n")
		require.True(t, found, tag)
		block, _, _ = strings.Cut(block, "```")
		require.Contains(t, tested, block)
	}
}
