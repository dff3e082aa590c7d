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
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/html"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/inspect"
	"github.com/pgratelimit/pgratelimit/server/internal/metrics"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func zero() int64 { return 0 }

var quiet = State{
	State:  metrics.State{CallsUnderWay: zero, ConnectionsInUse: zero, ConnectionsTotal: zero},
	Counts: func() metrics.Counts { return metrics.Counts{} }, Health: func() string { return "" }, IsDown: func(int) bool { return false },
}

// away has no database that is asked.
func away(state State) *Page {
	if state.Health() == "" {
		state.Health = func() string { return "away" }
	}
	return newPage([]*pgxpool.Pool{nil}, state, slog.New(slog.DiscardHandler), (&clock{t0}).read)
}

// A clock is what a test says it is.
type clock struct{ now time.Time }

func (c *clock) read() time.Time { return c.now }

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
		require.Equal(t, []string{name(word) + " override"}, text(t, page, "key"))
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
	_, page := get(p, "/")
	require.Equal(t, 2, strings.Count(page, `evil\u202etxt`), "both of them")
	key := text(t, page, "key")[0]
	require.Len(t, []rune(key), maxName+1)
	require.True(t, strings.HasPrefix(key, `"<k\u202e<k\u202e`), key)
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
			"_other": {client.ResultError: 3},
		}}
	}
	p := away(state)
	policy := client.Policy{Capacity: 1, Refill: client.Zero, Remember: time.Hour}
	a, b := policy, policy
	a.Name, b.Name = "a", "b"
	p.databases[0].seen.policies = section[client.Policy]{rows: []client.Policy{a, b}, at: t0}
	_, page := get(p, "/")
	require.Equal(t, []string{
		"b 4,000 500 13 % 1 never 1h",
		"_other 3 0 of policies that are not known to exist",
		"a 0 0 1 never 1h",
	}, text(t, page, "tr")[1:])
}

// Most installations have neither replayed nor shadowed requests.
func TestPage_FoldsWhatIsRare(t *testing.T) {
	t.Parallel()
	p := away(quiet)
	p.history.sample(t0.Add(5*time.Second), tally{allowed: 10})
	_, page := get(p, "/")
	require.Equal(t, []string{"Replayed 0 Shadowed 0"}, text(t, page, "summary"))
	require.Contains(t, page, "<details>")
	p.history.sample(t0.Add(10*time.Second), tally{allowed: 10, shadowed: 5})
	_, page = get(p, "/")
	require.Equal(t, []string{"Replayed 0 Shadowed 1"}, text(t, page, "summary"))
	require.Contains(t, page, "<details open>")
}

// More than one error in a hundred requests is not healthy, and the page has this definition.
func TestPage_HealthIsAlsoTheShareOfErrors(t *testing.T) {
	t.Parallel()
	p := newPage(nil, quiet, slog.New(slog.DiscardHandler), (&clock{t0}).read)
	p.history.sample(t0.Add(5*time.Second), tally{allowed: 990, failed: 10})
	_, page := get(p, "/")
	require.Equal(t, []string{"Healthy"}, text(t, page, "health"))
	require.Contains(t, page, "Healthy: the database answers, and at most 1 % of the requests of the last minute ended in an error.")
	p.history.sample(t0.Add(10*time.Second), tally{allowed: 1900, failed: 100})
	_, page = get(p, "/")
	require.Equal(t, []string{"Not healthy"}, text(t, page, "health"))
	require.Contains(t, page, "Not healthy: 5 % of the requests of the last minute ended in an error.")
}

// A bucket in debt is empty. A bucket above its capacity, after an override, is full.
func TestBucketOf_IsFromEmptyToFull(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		remaining, capacity int64
		percent             float64
		isEmpty             bool
	}{{5, 10, 50, false}, {10, 10, 100, false}, {20, 10, 100, false}, {0, 10, 0, true}, {-5, 10, 0, true}, {0, 0, 0, true}} {
		b := bucketOf(0, inspect.Bucket{Remaining: test.remaining, Capacity: test.capacity})
		require.Equal(t, test.percent, b.Percent, test)
		require.Equal(t, test.isEmpty, b.IsEmpty, test)
	}
}

func TestPolicyOf_TellsWhatIsNotByDefault(t *testing.T) {
	t.Parallel()
	plain := client.Policy{Capacity: 1, Refill: 1, Every: time.Second, Stepped: client.No, Durable: client.Yes, Shadow: client.No, Remember: time.Hour}
	require.Empty(t, policyOf(0, plain).Tags)
	odd := client.Policy{Capacity: 1, Refill: client.Zero, Every: time.Second, Stepped: client.Yes, Durable: client.No, Shadow: client.Yes}
	require.Equal(t, []string{"stepped", "ephemeral", "shadow"}, policyOf(0, odd).Tags)
	require.Equal(t, "never", policyOf(0, odd).Refills)
	plan := client.Policy{Capacity: 1, Period: client.Period{Months: 1}, TimeZone: "Europe/Berlin", Anchor: time.Unix(0, 0)}
	require.Equal(t, "full every 1 month, Europe/Berlin", policyOf(0, plan).Refills)
	slots := policyOf(0, client.Policy{Capacity: 5, Lease: 5 * time.Minute, Durable: client.Yes, Shadow: client.Yes})
	require.Equal(t, []any{"slots, held for 5m", "", []string{"shadow"}}, []any{slots.Refills, slots.Remember, slots.Tags})
}

func TestPage_LetsTheBrowserDoNothing(t *testing.T) {
	t.Parallel()
	p := away(quiet)
	answer, page := get(p, "/")
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
	p := newPage([]*pgxpool.Pool{db}, quiet, slog.New(slog.DiscardHandler), now)
	p.databases[0].patience = time.Minute // on any machine
	p.databases[0].policies.limit, p.databases[0].buckets.limit, p.databases[0].findings.limit = time.Minute, time.Minute, time.Minute
	return p
}

func TestPage_ShowsTheDatabase(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, "select ratelimit_override('api', 'user:7', capacity => 1000)")
	db.Exec(t, "select ratelimit_acquire('api', 'user:42', 10), ratelimit_acquire('api', 'user:7', 900), ratelimit_acquire('exports', E'x\\u202ey', 1)")
	db.Exec(t, "select ratelimit_acquire('api', 'full', 5), ratelimit_refund('api', 'full', 5)") // a bucket that has a row and is full is no news
	p := shown(db.Pool, time.Now)
	p.history = &history{begun: t0}
	p.history.sample(t0.Add(5*time.Second), tally{denied: 30})
	_, page := get(p, "/")
	require.Equal(t, []string{"user:42", "user:7 override", `"x\u202ey"`}, text(t, page, "key"))
	require.Equal(t, []string{"Tokens left", "0 of 10", "100 of 1,000", "4 of 5"}, text(t, page, "level"))
	require.Contains(t, text(t, page, "tr"), "exports stepped 0 0 5 5 every 1h 1d")
	require.Contains(t, text(t, page, "tr"), "api 0 0 10 1 every 1d 1d")
	require.Equal(t, []string{"Allowed 0", "Denied 6", "Errors 0", "Replayed 0", "Shadowed 0"}, text(t, page, "figcaption"))
	require.Empty(t, text(t, page, "notice"))
	require.Equal(t, []string{"Healthy"}, text(t, page, "health"))
}

// The search takes a key in the form that the page shows. The key stays text.
func TestPage_FindsOneKey(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	const odd = "O'Brien\"; -- \n\u202e<b>"
	db.Exec(t, "select ratelimit_acquire('api', $1, 3), ratelimit_acquire('exports', $1, 5), ratelimit_acquire('api', 'other', 1)", odd)
	p := shown(db.Pool, time.Now)
	find := func(policy, key string) (keys, levels, says []string) {
		_, page := get(p, "/?"+url.Values{"policy": {policy}, "key": {key}}.Encode())
		require.NotContains(t, page, "http-equiv", "it does not load anew")
		_, page, _ = strings.Cut(page, `<section id="find">`)
		page, _, _ = strings.Cut(page, "</section>")
		return text(t, page, "key"), text(t, page, "tokens"), append(text(t, page, "fine"), text(t, page, "notice")...)
	}
	for _, key := range []string{odd, inspect.Printable(odd)} {
		keys, levels, _ := find("api", key)
		require.Equal(t, []string{inspect.Printable(odd)}, keys)
		require.Equal(t, []string{"7 of 10"}, levels)
		_, levels, _ = find("", key)
		require.Equal(t, []string{"0 of 5", "7 of 10"}, levels)
	}
	for _, test := range []struct{ policy, key, says string }{
		{"api", "nobody", "The bucket has no row: it is full."},
		{"'; select", "other", "There is no such policy."},
		{"api", strings.Repeat("k", 10_000), "The database failed: invalid key (22023)."},
	} {
		keys, _, says := find(test.policy, test.key)
		require.Empty(t, keys)
		require.Equal(t, []string{test.says}, says)
	}
	_, page := get(p, "/")
	require.NotContains(t, page, "<form", "what is typed would be lost when the page loads anew")
}

// A search for a key of slots lists who holds them. A bucket of the same key adds nobody.
func TestPage_FindsTheHoldersOfAKey(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, "select ratelimit_define_policy('jobs', 5, lease => '1 hour'), ratelimit_define_policy('streams', 2, lease => '1 minute')")
	db.Exec(t, "select ratelimit_acquire('api', 'tenant'), ratelimit_hold('jobs', 'tenant', $1, 2), ratelimit_hold('streams', 'tenant', 'b')", hostile)
	db.Exec(t, "select ratelimit_hold('jobs', 'another', 'c')")
	search := "/?" + url.Values{"key": {"tenant"}}.Encode()
	_, page := get(shown(db.Pool, time.Now), search)
	_, found, _ := strings.Cut(page, `<section id="find">`)
	require.Equal(t, []string{"1 of 2", "3 of 5", "9 of 10"}, text(t, found, "tokens"))
	rows := text(t, found, "tr")
	require.Contains(t, rows, "PolicyHolderSlotsLease ends in")
	require.Regexp(t, `^jobs `+regexp.QuoteMeta(name(hostile))+` 2 [0-9ms]+$`, rows[slices.Index(rows, "PolicyHolderSlotsLease ends in")+2])
	require.Regexp(t, `^streams b 1 [0-9.ms]+$`, rows[slices.Index(rows, "PolicyHolderSlotsLease ends in")+1])
	require.NotContains(t, strings.Join(rows, "\n"), "another c")
}

func TestPage_OfAnEmptyDatabase(t *testing.T) {
	t.Parallel()
	_, page := get(shown(pgtest.New(t).Pool, time.Now), "/")
	require.Subset(t, text(t, page, "fine"), []string{"Every bucket is full.", "There is no policy yet."})
	require.Empty(t, text(t, page, "notice"))
}

func TestPage_SaysThatThereAreMorePolicies(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "select count(ratelimit_define_policy('p' || n, 10, 1, '1 day')) from generate_series(1, 201) as n")
	p := shown(db.Pool, time.Now)
	_, page := get(p, "/")
	require.Contains(t, page, "There are more. This page shows the first 200.")
	db.Exec(t, "select ratelimit_drop_policy('p1')")
	_, page = get(shown(db.Pool, time.Now), "/")
	require.NotContains(t, page, "There are more.")
}

// Every five seconds at most, and a twentieth of the time.
func TestPage_AsksSeldom(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	now := &clock{t0}
	p := shown(db.Pool, now.read)
	keys := func() []string {
		_, page := get(p, "/")
		return text(t, page, "key")
	}
	require.Empty(t, keys())
	db.Exec(t, "select ratelimit_acquire('api', 'k', 5)")
	now.now = t0.Add(5*time.Second - 1)
	require.Empty(t, keys())
	now.now = t0.Add(5 * time.Second)
	require.Equal(t, []string{"k"}, keys())

	ticking := &clock{t0} // half a second for each look at it
	p = shown(db.Pool, func() time.Time {
		ticking.now = ticking.now.Add(time.Second / 2)
		return ticking.now
	})
	p.databases[0].look(false)
	require.Equal(t, p.databases[0].buckets.at.Add(10*time.Second), p.databases[0].buckets.nextAt)
	require.Equal(t, p.databases[0].findings.at.Add(time.Minute), p.databases[0].findings.nextAt)
}

// A statement that takes too long is canceled, and the page shows the rows read before. Other readers do not wait.
func TestPage_GivesUp(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, "select ratelimit_acquire('api', 'k', 5)")
	now := &clock{t0}
	p := shown(db.Pool, now.read)
	_, page := get(p, "/")
	require.Equal(t, []string{"k"}, text(t, page, "key"))

	locker := db.Connect(t)
	require.NoError(t, kit.ErrorOf(locker.Exec(t.Context(), "begin; lock table ratelimit.buckets in access exclusive mode")))
	now.now = t0.Add(10 * time.Second)
	looked := make(chan string, 1)
	go func() {
		_, page := get(p, "/")
		looked <- page
	}()
	db.Await(t, 20*time.Second, "select count(*) = 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'")
	_, page = get(p, "/")
	require.Equal(t, []string{"k"}, text(t, page, "key"))
	require.Empty(t, looked, "the other one is waiting still")
	db.Exec(t, "select pg_cancel_backend(pid) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'")
	<-looked

	limit := p.databases[0].buckets.limit
	p.databases[0].buckets.limit = 20 * time.Millisecond
	now.now = t0.Add(15 * time.Second)
	_, page = get(p, "/")
	require.Equal(t, []string{"k"}, text(t, page, "key"))
	require.Contains(t, text(t, page, "h2"), "Emptiest buckets seen 15s ago")
	require.Equal(t, []string{"The database took longer than 20ms, and was not waited for. On a command line, pgratelimit status waits."}, text(t, page, "notice"))
	require.NoError(t, kit.ErrorOf(locker.Exec(t.Context(), "rollback")))
	p.databases[0].buckets.limit = limit // to connect anew may take longer than 20 ms
	now.now = t0.Add(20 * time.Second)
	_, page = get(p, "/")
	require.Empty(t, text(t, page, "notice"))
}

// The page has the statement that grants what is missing, and shows the rest.
func TestPage_WithoutGrants(t *testing.T) {
	t.Parallel()
	role := kit.NewRole(t)
	db := newDB(t)
	db.Exec(t, "grant execute on function ratelimit_policies to "+role)
	pool := kit.PoolAs(t, db, role)
	p := shown(pool, time.Now)
	_, page := get(p, "/")
	require.Contains(t, text(t, page, "tr"), "api 0 0 10 1 every 1d 1d")
	notices := text(t, page, "notice")
	require.Len(t, notices, 2)
	for i, function := range []string{"ratelimit_doctor", "ratelimit_status"} {
		_, grant, _ := strings.Cut(notices[i], "can run: ")
		require.Equal(t, "grant execute on function "+function+" to "+role+";", grant)
		db.Exec(t, grant)
	}
	_, page = get(shown(pool, time.Now), "/")
	require.Empty(t, text(t, page, "notice"))
	db.Exec(t, "select ratelimit_define_policy('jobs', 5, lease => '1 hour'), ratelimit_hold('jobs', 'tenant', 'a')")
	_, page = get(shown(pool, time.Now), "/?key=tenant")
	require.Contains(t, strings.Join(text(t, page, "notice"), "\n"), "can run: grant execute on function ratelimit_holders to "+role+";")
}

func TestPage_NobodyAnswers(t *testing.T) {
	t.Parallel()
	pool := kit.NoError(pgxpool.New(t.Context(), "postgres://127.0.0.1:1/none?sslmode=disable"))(t)
	defer pool.Close()
	_, page := get(shown(pool, time.Now), "/")
	require.Len(t, text(t, page, "notice"), 3)
	require.Equal(t, "The database did not answer. This is tried again.", text(t, page, "notice")[0])
	require.Len(t, text(t, page, "figcaption"), 5)
}

// A failing database gets no more queries than a working one, and each fault has one line in the log.
func TestPage_FaultsAreAskedForSeldomAndLoggedOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	var logged bytes.Buffer
	now := &clock{t0}
	p := newPage([]*pgxpool.Pool{db.Pool}, quiet, slog.New(slog.NewTextHandler(&logged, nil)), now.read)
	for range 3 {
		p.databases[0].look(false)
		require.Equal(t, now.now.Add(5*time.Second), p.databases[0].policies.nextAt)
		require.Equal(t, now.now.Add(5*time.Second), p.databases[0].buckets.nextAt)
		now.now = now.now.Add(5 * time.Second)
	}
	require.Equal(t, t0.Add(time.Minute), p.databases[0].findings.nextAt)
	require.Equal(t, 3, strings.Count(logged.String(), "cannot show everything"), logged.String())
}
