package torture

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// HTTP servers with each way to go without a database, and callers of each, while the database is stopped, started, frozen and thawed. With
// a database all of them limit. Without, each answers as it says, while there is none. In the end no goroutine is left.
func TestTorture_HTTPLimitsWhileThereIsADatabase(t *testing.T) {
	pgtest.OncePerServer(t)
	run := kit.Torture(t, 1)
	db, server := kit.NewPrivateDB(t)
	db.DefinePolicy(httpPolicy.Name, httpPolicy.Capacity, httpPolicy.Refill, httpPolicy.Every)
	db.Pool.Close() // it is not to be disturbed

	label := t.Name() // on every goroutine that starts in here
	all := map[httpPhase]*httpAnswers{}
	pprof.Do(t.Context(), pprof.Labels("client", label), func(ctx context.Context) {
		o := newHTTPOutage(t, server)
		o.awaitRecovery()
		for rounds := 0; run.GoesOn(); rounds++ {
			o.phase("before", run.Budget/10)
			require.NoError(t, server.Stop(ctx, true))
			o.awaitBrokenConnections()
			o.phase("stopped", run.Budget/10)
			require.NoError(t, server.Start(ctx))
			o.at.MoveTo(server.URL(kit.PrivateName))
			o.awaitRecovery()
			o.phase("started", run.Budget/10)
			pgtest.OrSkip(t, server.Freeze(ctx))
			o.phase("frozen", run.Budget/10)
			require.NoError(t, server.Thaw(ctx))
			o.awaitRecovery()
			o.phase("thawed", run.Budget/10)
			run.Progress("%d rounds", rounds+1)
		}
		all = o.end()
	})
	awaitNoGoroutines(t, label)

	for _, phase := range slices.SortedFunc(maps.Keys(all), func(a, b httpPhase) int { return cmp.Or(cmp.Compare(a.mode, b.mode), cmp.Compare(a.name, b.name)) }) {
		answers := all[phase]
		slices.Sort(answers.times)
		p99 := answers.times[len(answers.times)*99/100]
		run.Figure(fmt.Sprintf("%s, %s", phase.mode, phase.name), fmt.Sprintf("%v, p99 %v", answers.statuses, p99.Round(100*time.Microsecond)), "")

		require.ElementsMatch(t, phase.statuses(), slices.Collect(maps.Keys(answers.statuses)), "%+v: %v", phase, answers.statuses)
	}
	require.Len(t, all, 3*5)
}

const (
	httpTimeout = 500 * time.Millisecond
	httpCallers = 3 // of each server
)

var (
	// A user asks six times, so that there are grants and denials, however fast the machine.
	httpPolicy = client.Policy{Name: "api", Capacity: 4, Refill: 1, Every: kit.ADay}
	httpShare  = client.Policy{Name: "api", Capacity: 2, Refill: 1, Every: kit.ADay} // of each server, meanwhile
)

const asksOfAUser = 6

type httpPhase struct{ mode, name string }

// statuses are those of the answers, of which each is to be seen.
func (p httpPhase) statuses() []int {
	if p.name == "stopped" || p.name == "frozen" {
		return map[string][]int{"closed": {503}, "open": {200}, "local": {200, 429}}[p.mode]
	}
	return []int{200, 429}
}

type httpAnswers struct {
	statuses map[int]int // but for answers that came late
	times    []time.Duration
}

// An httpOutage is servers and their callers.
type httpOutage struct {
	t       *testing.T
	load    *kit.Load
	close   []func()
	at      kit.Address            // of the database
	current atomic.Pointer[string] // the name of the phase; requests count that begin and end in one
	callers []*httpCaller
	pools   []*pgxpool.Pool

	mu      sync.Mutex
	answers map[httpPhase]*httpAnswers
}

// An httpCaller has one request under way. A machine that stands still for as long as the timeout ends calls, and makes a Combiner refuse
// requests for a moment: neither says that the database is gone, nor does silence say that it is back.
type httpCaller struct {
	isLate atomic.Bool  // the last request failed because time was short
	failed atomic.Int64 // when a request last failed, in nanoseconds
	inARow atomic.Int64 // answers since then
}

func (c *httpCaller) answered(err error) {
	c.isLate.Store(errors.Is(err, context.DeadlineExceeded) || errors.Is(err, client.ErrOverloaded))
	if c.inARow.Add(1); err != nil {
		c.failed.Store(time.Now().UnixNano())
		c.inARow.Store(0)
	}
}

func newHTTPOutage(t *testing.T, server *pgtest.Server) *httpOutage {
	o := &httpOutage{t: t, load: kit.NewLoad(t), answers: map[httpPhase]*httpAnswers{}}
	o.between()
	o.at.MoveTo(server.URL(kit.PrivateName))
	for mode, failure := range map[string]func() httplimit.Failure{
		"closed": func() httplimit.Failure { return httplimit.Closed(httpTimeout) },
		"open":   func() httplimit.Failure { return httplimit.Open(httpTimeout) },
		"local":  func() httplimit.Failure { return httplimit.Local(httpTimeout, httplimit.NewMemory(httpShare)) },
	} {
		for _, combined := range []bool{false, true} {
			config := o.at.Config(t)
			config.ConnConfig.ConnectTimeout = time.Second
			pool := kit.NoError(pgxpool.NewWithConfig(context.Background(), config))(t)
			o.pools = append(o.pools, pool)
			o.serve(mode, failure(), pool, combined)
		}
	}
	return o
}

// serve starts a server and its callers.
func (o *httpOutage) serve(mode string, failure httplimit.Failure, pool *pgxpool.Pool, combined bool) {
	var limiter client.Acquirer = client.New(pool)
	if combined {
		combiner := client.NewCombiner(pool)
		o.close = append(o.close, combiner.Close)
		limiter = combiner
	}
	var callers [httpCallers]httpCaller
	user := httplimit.ByUser(func(r *http.Request) string { return r.Header.Get("User") }, httplimit.ByIP(0))
	limit := httplimit.New(limiter, httplimit.Per(httpPolicy.Name, user), failure,
		httplimit.Observe(func(r *http.Request, e httplimit.Event) {
			caller, _ := strconv.Atoi(r.Header.Get("Caller"))
			callers[caller].answered(e.Err)
		}))
	server := httptest.NewServer(limit(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
	transport := &http.Transport{MaxIdleConnsPerHost: httpCallers}
	o.close = append(o.close, transport.CloseIdleConnections, server.Close, pool.Close)
	name := fmt.Sprint(mode, combined)
	var asks [httpCallers]int
	for caller := range callers {
		o.callers = append(o.callers, &callers[caller])
	}
	o.load.Start(httpCallers, func(caller int) error {
		asks[caller]++
		header := http.Header{"User": {fmt.Sprint(name, caller, " ", asks[caller]/asksOfAUser)}, "Caller": {fmt.Sprint(caller)}}
		return o.ask(mode, transport, server.URL, header, &callers[caller])
	})
}

// ask makes one request, and counts its answer if the phase did not change meanwhile.
func (o *httpOutage) ask(mode string, transport *http.Transport, url string, header http.Header, caller *httpCaller) error {
	request, err := http.NewRequestWithContext(context.Background(), http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	request.Header = header
	phase, started := o.current.Load(), time.Now()
	response, err := transport.RoundTrip(request)
	if err != nil {
		return err
	}
	took := time.Since(started)
	_, err = io.Copy(io.Discard, response.Body)
	response.Body.Close()
	if *phase == "" || o.current.Load() != phase {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	key := httpPhase{mode, *phase}
	if o.answers[key] == nil {
		o.answers[key] = &httpAnswers{statuses: map[int]int{}}
	}
	if !caller.isLate.Load() || *phase == "frozen" {
		o.answers[key].statuses[response.StatusCode]++
	}
	o.answers[key].times = append(o.answers[key].times, took)
	return err
}

// phase counts answers for a while, and until all kinds were seen.
func (o *httpOutage) phase(name string, lasts time.Duration) {
	o.current.Store(&name)
	o.load.RunFor(lasts)
	for started := time.Now(); o.missing(name) != "" && o.load.Ctx.Err() == nil; time.Sleep(5 * time.Millisecond) {
		require.Less(o.t, time.Since(started), 3*kit.Patience, o.missing(name))
	}
	o.between()
	require.NoError(o.t, o.load.Ctx.Err(), "a caller has failed")
}

// missing names an answer that was not seen yet.
func (o *httpOutage) missing(name string) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, mode := range []string{"closed", "open", "local"} {
		phase := httpPhase{mode, name}
		for _, status := range phase.statuses() {
			if answers := o.answers[phase]; answers == nil || answers.statuses[status] == 0 {
				return fmt.Sprintf("%+v: no answer with %d", phase, status)
			}
		}
	}
	return ""
}

// awaitBrokenConnections returns when the pools have none left from before the database stopped.
func (o *httpOutage) awaitBrokenConnections() {
	require.Eventually(o.t, func() bool {
		return !slices.ContainsFunc(o.pools, func(p *pgxpool.Pool) bool { return p.Stat().IdleConns()+p.Stat().AcquiredConns() > 0 })
	}, kit.Patience, 5*kit.Ms)
}

func (o *httpOutage) between() { o.current.Store(new(string)) }

// awaitRecovery returns when each caller has had nothing but answers, three and more, for as long as the timeout.
func (o *httpOutage) awaitRecovery() {
	began := time.Now()
	for _, c := range o.callers {
		c.inARow.Store(0)
	}
	isBack := func(c *httpCaller) bool {
		return c.inARow.Load() >= 3 && time.Since(time.Unix(0, max(began.UnixNano(), c.failed.Load()))) >= httpTimeout
	}
	for slices.ContainsFunc(o.callers, func(c *httpCaller) bool { return !isBack(c) }) {
		require.Less(o.t, time.Since(began), kit.Patience, "a server does not recover")
		time.Sleep(5 * time.Millisecond)
	}
}

func (o *httpOutage) end() map[httpPhase]*httpAnswers {
	require.NoError(o.t, o.load.End())
	for _, end := range o.close {
		end()
	}
	return o.answers
}

// The key functions of the middleware: what a client writes before what the trusted
// proxies add changes nothing, two users have two keys, no user has the key of an address, and each key is one that the database takes.
func TestTorture_HTTPKeysAreNotTheClientsChoice(t *testing.T) {
	pgtest.OncePerServer(t)
	run := kit.Torture(t, 5)
	random := rand.New(rand.NewPCG(kit.TestSeed(t), 0))

	users := map[string]string{} // by their keys
	last := ""
	inputs := 0
	for ; run.GoesOn(); run.Progress("%d requests", inputs) {
		for range 10_000 {
			inputs += 2
			checkAddressKey(t, random)
			last = checkUserKey(t, random, users, last)
		}
		if len(users) > 100_000 {
			clear(users)
		}
	}
	run.Figure("requests, each with one key", inputs, "")
}

func checkAddressKey(t *testing.T, random *rand.Rand) {
	proxies := random.IntN(5)
	key := httplimit.ByIP(proxies)
	request := func(lines ...string) *http.Request {
		return &http.Request{RemoteAddr: "192.0.2.9:4711", Header: http.Header{"X-Forwarded-For": lines}}
	}
	address := strings.Trim(strings.ReplaceAll(randomText(random), ",", ""), " \t")
	added := address + strings.Repeat(", 10.0.0.1", max(0, proxies-1))
	want := key(request(added))
	require.True(t, isKeyOf("ip:", want), "%q", want)
	direct := httplimit.ByIP(0)(&http.Request{RemoteAddr: address})
	if proxies > 0 && direct != "ip:unknown" {
		require.Equal(t, direct, want, "%d proxies, %q", proxies, added)
	}
	lying := request(randomText(random), randomText(random)+","+added)
	if random.IntN(2) == 0 {
		lying = request(randomText(random), randomText(random), added)
	}
	if got := key(lying); got != want {
		t.Fatalf("with %d proxies %q has the key %q, and without what the client wrote %q", proxies, lying.Header, got, want)
	}
}

// checkUserKey returns the key. The last one is what some users would like to have.
func checkUserKey(t *testing.T, random *rand.Rand, users map[string]string, last string) (key string) {
	name := randomText(random)
	switch random.IntN(50) {
	case 0:
		name = strings.Repeat("a", 500+random.IntN(20))
	case 1, 2, 3:
		name = strings.TrimPrefix(last, "user:")
	}
	key = httplimit.ByUser(func(*http.Request) string { return name }, httplimit.ByIP(0))(&http.Request{RemoteAddr: "192.0.2.9:4711"})
	if !isKeyOf("", key) || strings.HasPrefix(key, "ip:") != (name == "") {
		t.Fatalf("%q has the key %q", name, key)
	}
	if other, ok := users[key]; ok && other != name {
		t.Fatalf("%q and %q have the key %q", name, other, key)
	}
	users[key] = name
	return key
}

func isKeyOf(prefix, key string) bool {
	return strings.HasPrefix(key, prefix) && 1 <= len(key) && len(key) <= 512 && utf8.ValidString(key) && !strings.Contains(key, "\x00")
}

// randomText is pieces of what addresses, lists and keys are made of.
func randomText(random *rand.Rand) string {
	pieces := []string{
		"192.0.2.1", "203.0.113.7", "2001:db8::1", "::ffff:192.0.2.1", "fe80::1%eth0", ":", "[", "]", ",", ", ", " ", "\t", ".", "/64", "80",
		"unknown", "for=", "ip:", "user:", "user-sha256:", "sha256:", "\x00", "\xff", "é", "\"", "a", "42", "0", "::", "%",
	}
	var text strings.Builder
	for range random.IntN(7) {
		text.WriteString(pieces[random.IntN(len(pieces))])
	}
	return text.String()
}
