package page

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/html"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/inspect"
	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
	"github.com/pgratelimit/pgratelimit/server/internal/metrics"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var t0 = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

func zero() int64 { return 0 }

func counts(requests map[client.Result]int64) metrics.Counts {
	return metrics.Counts{Requests: map[string]map[client.Result]int64{"api": requests}}
}

var quiet = State{
	State:  metrics.State{CallsUnderWay: zero, ConnectionsInUse: zero, ConnectionsTotal: zero},
	Counts: func() metrics.Counts { return metrics.Counts{} }, Health: func() string { return "" }, IsDown: func(int) bool { return false },
}

// away has no database that is asked.
func away(state State) *Page {
	if state.Health() == "" {
		state.Health = func() string { return "away" }
	}
	return New([]*pgxpool.Pool{nil}, state, slog.New(slog.DiscardHandler), (&clock{t0}).read)
}

// A clock is what a test says it is.
type clock struct{ now time.Time }

func (c *clock) read() time.Time { return c.now }

const live = "/?refresh=on" // what loads anew, below the search

// get returns the page as a browser does.
func get(p http.Handler, path string) (answer *httptest.ResponseRecorder, page string) {
	w := httptest.NewRecorder()
	p.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return w, w.Body.String()
}

// elements calls see for the elements of a page.
func elements(t *testing.T, page string, see func(*html.Node)) {
	root := kit.NoError(html.Parse(strings.NewReader(page)))(t)
	for n := range root.Descendants() {
		if n.Type == html.ElementNode {
			see(n)
		}
	}
}

// text is what a person reads, of all elements of a class or of a kind.
func text(t *testing.T, page, selector string) (texts []string) {
	elements(t, page, func(n *html.Node) {
		classes := ""
		for _, a := range n.Attr {
			if a.Key == "class" {
				classes = a.Val
			}
		}
		if n.Data != selector && !strings.Contains(" "+classes+" ", " "+selector+" ") {
			return
		}
		var words strings.Builder
		for inner := range n.Descendants() {
			if inner.Type == html.TextNode {
				words.WriteString(inner.Data)
			}
		}
		texts = append(texts, strings.Join(strings.Fields(words.String()), " "))
	})
	return texts
}

const hostile = `</bdi></td><script>alert(1)</script><img src=x onerror="alert(2)"><a href="javascript:alert(3)">&lt;b&gt;'{{.}}`

// rows are those of the table that follows a title.
func rows(t *testing.T, page, title string) []string {
	_, page, _ = strings.Cut(page, "<h2>"+title+" ")
	page, _, _ = strings.Cut(page, "</section>")
	all := text(t, page, "tr")
	return all[min(1, len(all)):]
}

// The page has the same elements and attributes, whatever the names are.
func TestPage_EscapesEverything(t *testing.T) {
	t.Parallel()
	markup := func(word, path string) (all []string) {
		state := quiet
		state.Health = func() string { return word }
		p := away(state)
		p.databases[0].seen = snapshot{
			policies: section[client.Policy]{rows: []client.Policy{{Name: word, Capacity: 1, Refill: client.Zero, Remember: time.Hour}}, at: t0, notice: word},
			buckets:  section[inspect.Bucket]{rows: []inspect.Bucket{{Policy: word, Key: word, Overridden: true}}, at: t0, notice: word},
			findings: section[inspect.Finding]{rows: []inspect.Finding{{Severity: word, Finding: word, Remedy: word}}, at: t0, notice: word},
		}
		_, page := get(p, path+url.QueryEscape(word))
		require.Contains(t, rows(t, page, "Emptiest buckets")[0], named(word).Text+" override")
		elements(t, page, func(n *html.Node) {
			all = append(all, n.Data)
			for _, a := range n.Attr {
				all = append(all, a.Key)
			}
		})
		return all
	}
	for _, path := range []string{"/?x=", "/?refresh=off&policy="} {
		require.Equal(t, markup("plain", path), markup(hostile, path))
	}
}

// A name with U+202E would change the direction of the text around it.
func TestPage_NamesArePrintableAndALongOneIsWholeInItsTitle(t *testing.T) {
	t.Parallel()
	const odd = "evil\u202etxt.exe"
	long := strings.Repeat("<k\u202e", 2500)
	p := away(quiet)
	p.databases[0].seen = snapshot{
		policies: section[client.Policy]{rows: []client.Policy{{Name: odd}}, at: t0},
		buckets:  section[inspect.Bucket]{rows: []inspect.Bucket{{Policy: odd, Key: long}}, at: t0},
	}
	_, page := get(p, live)
	require.Equal(t, 2, strings.Count(page, `evil\u202etxt`), "both of them")
	require.Contains(t, rows(t, page, "Emptiest buckets")[0], `"<k\u202e<k\u202e`)
	require.Len(t, []rune(named(long).Text), maxName+1)
	require.False(t, strings.Contains(page, "\u202e"))
	require.Contains(t, page, `title="`+html.EscapeString(inspect.Printable(long))+`"`)
	require.Equal(t, 1, strings.Count(page, ` title=`), "a name that is shown whole needs none")
}

// The most denied policies come first. A policy that is not in the database has counts only.
func TestPage_CountsRequestsAndDenialsOfEachPolicy(t *testing.T) {
	t.Parallel()
	state := quiet
	state.Counts = func() metrics.Counts {
		return metrics.Counts{Requests: map[string]map[client.Result]int64{
			"b":      {client.ResultAllowed: 2500, client.ResultDenied: 500, client.ResultError: 1000},
			"_other": {client.ResultError: 3}, "gone": {client.ResultAllowed: 1},
		}}
	}
	p := away(state)
	plain := client.Policy{Name: "b", Capacity: 1, Refill: 1, Every: time.Second, Stepped: client.No, Durable: client.Yes, Shadow: client.No, Remember: time.Hour}
	p.databases[0].seen.policies = section[client.Policy]{at: t0, rows: []client.Policy{
		plain,
		{Name: "odd", Capacity: 1, Refill: client.Zero, Every: time.Second, Stepped: client.Yes, Durable: client.No, Shadow: client.Yes},
		{Name: "plan", Capacity: 1, Period: client.Period{Months: 1}, TimeZone: "Europe/Berlin", Anchor: time.Unix(0, 0), Remember: time.Hour},
		{Name: "slots", Capacity: 5, Lease: 5 * time.Minute, Durable: client.Yes, Shadow: client.Yes},
	}}
	_, page := get(p, live)
	require.Equal(t, []string{
		"b4,000500 (12.5 %)11 every 1s1h", "_other30of policies that are not known to exist", "gone10not seen in the database",
		"odd ephemeral shadow stepped001never0us", "plan001full every 1 month, Europe/Berlin1h", "slots shadow005slots, held for 5m",
	}, rows(t, page, "Policies"))
}

// Rates are those of the last sample, minute and ten minutes, and are also counted by a server that just began.
func TestPage_RatesAndHealth(t *testing.T) {
	t.Parallel()
	p := New(nil, quiet, slog.New(slog.DiscardHandler), (&clock{t0}).read)
	require.Zero(t, p.history.errorShare())
	now, sum := t0, map[client.Result]int64{}
	pass := func(samples int, more map[client.Result]int64) (page string) {
		for range samples {
			p.history.add(now, counts(sum))
			for result, n := range more {
				sum[result] += n
			}
			now = now.Add(sampleEvery)
		}
		p.history.add(now, counts(sum))
		_, page = get(p, live)
		return page
	}
	page := pass(1, map[client.Result]int64{client.ResultAllowed: 495, client.ResultError: 5})
	require.Equal(t, []string{"Healthy"}, text(t, page, "health"))
	require.Contains(t, page, "Healthy: the database answers, and at most 1 % of the requests of the last minute ended in an error.")
	require.Equal(t, []string{"allowed999999", "denied000", "replayed000", "shadowed000", "error111"}, rows(t, page, "Requests a second"))
	page = pass(1, map[client.Result]int64{client.ResultError: 20})
	require.Equal(t, []string{"Not healthy"}, text(t, page, "health"))
	require.Contains(t, page, "Not healthy: 4.8 % of the requests of the last minute ended in an error.")
	pass(120, map[client.Result]int64{client.ResultDenied: 5})
	page = pass(minute, map[client.Result]int64{client.ResultDenied: 10})
	require.Equal(t, []string{"Healthy"}, text(t, page, "health"), "the errors are long ago")
	require.Regexp(t, `^denied221\.[01]$`, rows(t, page, "Requests a second")[1])
	require.Len(t, p.history.samples, samples)
}

func TestWords(t *testing.T) {
	t.Parallel()
	require.Equal(t, "9,000,000,000,000", number(9_000_000_000_000))
	for rate, want := range map[float64]string{0: "0", 0.2: "0.2", 9.96: "10", 0.02: "0", 12345.6: "12,345.6"} {
		require.Equal(t, want, decimal(rate))
	}
	for d, want := range map[time.Duration]string{
		0: "now", time.Microsecond: "< 1ms", 430 * time.Millisecond: "430ms", 12900 * time.Millisecond: "12s", 200 * time.Second: "3m20s",
		time.Hour + time.Second: "1h", 36*time.Hour + time.Minute: "1d12h", 1<<63 - 1: "106751d23h",
	} {
		require.Equal(t, want, until(new(jsonapi.Seconds(d))), d)
	}
	require.Equal(t, "never", until(nil))
	require.Equal(t, "1d1us", interval(24*time.Hour+time.Microsecond))
}

func TestPage_LetsTheBrowserDoNothing(t *testing.T) {
	t.Parallel()
	p := away(quiet)
	answer, page := get(p, live)
	require.Equal(t, http.StatusOK, answer.Code)
	require.Equal(t, "text/html; charset=utf-8", answer.Header().Get("Content-Type"))
	require.Equal(t, "no-store", answer.Header().Get("Cache-Control"))
	require.Equal(t, "nosniff", answer.Header().Get("X-Content-Type-Options"))
	csp := answer.Header().Get("Content-Security-Policy")
	require.Contains(t, csp, "default-src 'none'")
	require.NotContains(t, csp, "unsafe")
	require.NotContains(t, csp, "script-src")
	inline := regexp.MustCompile(`(?s)<style>(.*)</style>`).FindStringSubmatch(page)
	require.NotNil(t, inline)
	sum := sha256.Sum256([]byte(inline[1]))
	require.Contains(t, csp, "'sha256-"+base64.StdEncoding.EncodeToString(sum[:])+"'", "the hash is that of the style")
	require.Contains(t, page, `<meta http-equiv="refresh" content="10">`)
	_, page = get(p, "/?refresh=off")
	require.NotContains(t, page, "http-equiv")
}

// newDB returns a database with policies and a pool of its own, whose settings the test may choose.
func newDB(t *testing.T) *pgtest.DB {
	db := pgtest.New(t)
	db.Exec(t, `select ratelimit_define_policy('api', 10, 1, '1 day'), ratelimit_define_policy('exports', 5, 5, '1 hour', stepped => true)`)
	return db
}

func shown(db *pgxpool.Pool, now func() time.Time) *Page {
	p := New([]*pgxpool.Pool{db}, quiet, slog.New(slog.DiscardHandler), now)
	p.databases[0].patience, p.databases[0].limit = time.Minute, time.Minute // on any machine
	return p
}

// A bucket in debt is empty. A bucket above its capacity, after an override, is full, and one that is more than half full is no news.
func TestPage_ShowsTheDatabase(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, "select ratelimit_override('api', 'user:7', capacity => 1000)")
	db.Exec(t, "select ratelimit_charge('api', 'user:42', 11), ratelimit_acquire('api', 'user:7', 900), ratelimit_acquire('exports', E'x\\u202ey', 1)")
	db.Exec(t, "select ratelimit_acquire('api', 'full', 5), ratelimit_refund('api', 'full', 5)")
	_, page := get(shown(db.Pool, time.Now), live)
	buckets := rows(t, page, "Emptiest buckets")
	require.Len(t, buckets, 2)
	require.Regexp(t, "^apiuser:42-1 of 10[0-9dh]+$", buckets[0])
	require.Regexp(t, "^apiuser:7 override100 of 1,000now", buckets[1])
	require.Equal(t, []string{`value="0"`, `value="0.1"`}, regexp.MustCompile(`value="[0-9.]+"`).FindAllString(page, -1))
	require.Equal(t, []string{"api00101 every 1d1d", "exports stepped0055 every 1h1d"}, rows(t, page, "Policies"))
	require.Empty(t, text(t, page, "notice"))
	require.Equal(t, []string{"Healthy"}, text(t, page, "health"))
	require.Regexp(t, `^do \$give_away\$ declare .* end; \$give_away\$;$`, text(t, page, "pre")[0], "whole, without the words around it")
	require.Equal(t, cell{Text: "Old: see others. Then run:", Code: "vacuum a.b;", After: " This is a standby: do it there."},
		remedy("Old: see others. Then run: vacuum a.b; This is a standby: do it there."))
}

// found returns the tables of a search, without heads.
func found(t *testing.T, page string) []string {
	_, page, _ = strings.Cut(page, `<section id="find">`)
	require.NotContains(t, page, "http-equiv", "it does not load anew")
	return append(append(text(t, page, "tr"), text(t, page, "fine")...), text(t, page, "notice")...)
}

// The search takes a key as the page shows it. The key stays text. One of slots has its holders; a bucket of the same key adds nobody.
func TestPage_FindsOneKey(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	const odd = "O'Brien\"; -- \n\u202e<b>"
	db.Exec(t, "select ratelimit_define_policy('jobs', 5, lease => '1 hour'), ratelimit_define_policy('streams', 2, lease => '1 minute')")
	db.Exec(t, "select ratelimit_acquire('api', $1, 3), ratelimit_acquire('exports', $1, 5), ratelimit_acquire('api', 'other', 1)", odd)
	db.Exec(t, "select ratelimit_acquire('api', 'tenant'), ratelimit_hold('jobs', 'tenant', $1, 2), ratelimit_hold('streams', 'tenant', 'b')", hostile)
	db.Exec(t, "select ratelimit_hold('jobs', 'another', 'c')")
	p := shown(db.Pool, time.Now)
	for _, test := range []struct {
		policy, key string
		want        []string // patterns
	}{
		{"api", odd, []string{"PolicyKey.*", "api.*7 of 10.*"}},
		{"api", inspect.Printable(odd), []string{"PolicyKey.*", "api.*7 of 10.*"}},
		{"", odd, []string{"PolicyKey.*", "exports.*0 of 5.*", "api.*7 of 10.*"}},
		{"", "tenant", []string{"PolicyKey.*", "streamstenant1 of 2.*", "jobstenant3 of 5.*", "apitenant9 of 10.*", "PolicyHolderSlotsLease ends in",
			"jobs" + regexp.QuoteMeta(named(hostile).Text) + "2[0-9ms]+", "streamsb1[0-9ms]+"}},
		{"api", "nobody", []string{"The bucket has no row: it is full."}},
		{"'; select", "other", []string{"There is no such policy."}},
		{"api", strings.Repeat("k", 10_000), []string{`The database failed: invalid key \(22023\).`}},
	} {
		_, page := get(p, "/?"+url.Values{"policy": {test.policy}, "key": {test.key}}.Encode())
		is := found(t, page)
		require.Len(t, is, len(test.want), "%q", is)
		for i, pattern := range test.want {
			require.Regexp(t, "^"+pattern+"$", is[i])
		}
	}
	_, page := get(p, live)
	require.NotContains(t, page, "<form", "what is typed would be lost when the page loads anew")
	_, page = get(p, "/")
	require.Regexp(t, `(?s)<form target="seen">.*<option value="jobs">.*<iframe name="seen" [^>]*src="/\?refresh=on">`, page)
	require.NotContains(t, page, "http-equiv")
}

func TestPage_OfAnEmptyDatabaseAndOfManyPolicies(t *testing.T) {
	db := pgtest.Parallel(t)
	_, page := get(shown(db.Pool, time.Now), live)
	require.Subset(t, text(t, page, "fine"), []string{"Every bucket is more than half full.", "There is no policy yet."})
	require.Empty(t, text(t, page, "notice"))
	db.Exec(t, "select count(ratelimit_define_policy('p' || n, 10, 1, '1 day')) from generate_series(1, 201) as n")
	_, page = get(shown(db.Pool, time.Now), live)
	require.Contains(t, page, "There are more. This page shows the first 200.")
	db.Exec(t, "select ratelimit_drop_policy('p1')")
	_, page = get(shown(db.Pool, time.Now), live)
	require.NotContains(t, page, "There are more.")
}

// Every five seconds at most, and a twentieth of the time, also of a failing database. Each fault has one line in the log.
func TestPage_AsksSeldom(t *testing.T) {
	t.Parallel()
	db, empty := newDB(t), pgtest.Empty(t)
	now := &clock{t0}
	p := shown(db.Pool, now.read)
	buckets := func() int {
		_, page := get(p, live)
		return len(rows(t, page, "Emptiest buckets"))
	}
	require.Zero(t, buckets())
	db.Exec(t, "select ratelimit_acquire('api', 'k', 5)")
	now.now = t0.Add(5*time.Second - 1)
	require.Zero(t, buckets())
	now.now = t0.Add(5 * time.Second)
	require.Equal(t, 1, buckets())

	ticking := &clock{t0} // half a second for each look at it
	d := shown(db.Pool, func() time.Time {
		ticking.now = ticking.now.Add(time.Second / 2)
		return ticking.now
	}).databases[0]
	d.look(false)
	require.Equal(t, ticking.now.Add(40*time.Second), d.nextAt)

	var logged bytes.Buffer
	d = New([]*pgxpool.Pool{empty.Pool}, quiet, slog.New(slog.NewTextHandler(&logged, nil)), now.read).databases[0]
	for range 3 {
		d.look(false)
		require.Equal(t, now.now.Add(5*time.Second), d.nextAt)
		now.now = now.now.Add(5 * time.Second)
	}
	require.Equal(t, 3, strings.Count(logged.String(), "cannot show everything"), logged.String())
}

// A statement that takes too long is canceled, and the page shows the rows read before.
func TestPage_GivesUp(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, "select ratelimit_acquire('api', 'k', 5)")
	now := &clock{t0}
	p := shown(db.Pool, now.read)
	_, page := get(p, live)
	require.Contains(t, page, ">k<")

	locker := db.Connect(t)
	require.NoError(t, kit.ErrorOf(locker.Exec(t.Context(), "begin; lock table ratelimit.buckets in access exclusive mode")))
	p.databases[0].limit = 20 * time.Millisecond
	now.now = t0.Add(15 * time.Second)
	_, page = get(p, live)
	require.Contains(t, page, ">k<")
	require.Contains(t, text(t, page, "h2"), "Emptiest buckets seen 15s ago")
	require.Contains(t, text(t, page, "notice"), "The database took longer than 20ms, and was not waited for. On a command line, pgratelimit status waits.")
	require.NoError(t, kit.ErrorOf(locker.Exec(t.Context(), "rollback")))
	p.databases[0].limit = time.Minute // to connect anew may take longer than 20 ms
	now.now = t0.Add(time.Hour)
	_, page = get(p, live)
	require.Empty(t, text(t, page, "notice"))
}

// The page has the statement that grants what is missing, and shows the rest.
func TestPage_WithoutGrants(t *testing.T) {
	t.Parallel()
	role := kit.NewRole(t)
	db := newDB(t)
	db.Exec(t, "grant execute on function ratelimit_policies to "+role)
	pool := kit.PoolAs(t, db, role)
	_, page := get(shown(pool, time.Now), live)
	require.Equal(t, "api00101 every 1d1d", rows(t, page, "Policies")[0])
	notices := text(t, page, "notice")
	require.Len(t, notices, 2)
	for i, function := range []string{"ratelimit_doctor", "ratelimit_status"} {
		_, grant, _ := strings.Cut(notices[i], "can run: ")
		require.Equal(t, "grant execute on function "+function+" to <role>;", grant)
		db.Exec(t, strings.Replace(grant, "<role>", role, 1))
	}
	_, page = get(shown(pool, time.Now), live)
	require.Empty(t, text(t, page, "notice"))
	db.Exec(t, "select ratelimit_define_policy('jobs', 5, lease => '1 hour'), ratelimit_hold('jobs', 'tenant', 'a')")
	_, page = get(shown(pool, time.Now), "/?key=tenant")
	require.Contains(t, strings.Join(text(t, page, "notice"), "\n"), "can run: grant execute on function ratelimit_holders to <role>;")
}

func TestPage_NobodyAnswers(t *testing.T) {
	t.Parallel()
	pool := kit.NoError(pgxpool.New(t.Context(), "postgres://127.0.0.1:1/none?sslmode=disable"))(t)
	defer pool.Close()
	_, page := get(shown(pool, time.Now), live)
	require.Len(t, text(t, page, "notice"), 3)
	require.Equal(t, "The database did not answer. This is tried again.", text(t, page, "notice")[0])
	require.Len(t, rows(t, page, "Requests a second"), len(results))
}
