// Package page is the status page: it shows a server and its databases in a browser.
package page

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	_ "embed" // the template
	"encoding/base64"
	"fmt"
	"html/template"
	"log/slog"
	"maps"
	"math"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/text/language"
	"golang.org/x/text/message"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/auth"
	"github.com/pgratelimit/pgratelimit/server/internal/inspect"
	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
	"github.com/pgratelimit/pgratelimit/server/internal/metrics"
	"github.com/pgratelimit/pgratelimit/server/policyfile"
)

// refreshEvery is the interval at which a browser reloads the page.
const refreshEvery = 10 * time.Second

// maxErrors is the largest part of requests that may end in an error while the server is called healthy.
const maxErrors = 0.01

// State has functions that read the state of the server.
type State struct {
	metrics.State
	Counts     func() metrics.Counts
	Prefetches bool             // there may be some
	Health     func() string    // why no request can be answered, and nothing if some can
	IsDown     func(n int) bool // of the databases
}

// A Page answers requests for the status page.
type Page struct {
	history   history
	databases []*database // one, or its shards
	state     State
	log       *slog.Logger
	now       func() time.Time
	started   time.Time
}

// New returns a Page. It calls now for the time.
func New(databases []*pgxpool.Pool, state State, log *slog.Logger, now func() time.Time) *Page {
	p := &Page{state: state, log: log, now: now, started: now()}
	for n, db := range databases {
		d := &database{db: db, log: log, now: now, patience: readTime, limit: statementTime}
		if len(databases) > 1 {
			d.name = fmt.Sprintf("shard %d of %d", n, len(databases))
		}
		p.databases = append(p.databases, d)
	}
	return p
}

// Run adds to the history until ctx ends.
func (p *Page) Run(ctx context.Context) {
	ticker := time.NewTicker(sampleEvery)
	defer ticker.Stop()
	for {
		p.history.add(p.now(), p.state.Counts())
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

const (
	sampleEvery = 5 * time.Second
	samples     = int(10*time.Minute/sampleEvery) + 1
	minute      = int(time.Minute / sampleEvery) // in samples
)

// results are those that are counted, in the order of the page.
var results = [...]client.Result{client.ResultAllowed, client.ResultDenied, client.ResultReplayed, client.ResultShadowed, client.ResultError}

// A sample has the requests by result until then.
type sample struct {
	at     time.Time
	counts [len(results)]int64
}

// A history has samples of the last ten minutes, the oldest first.
type history struct {
	mu      sync.Mutex
	samples []sample
}

func (h *history) add(now time.Time, counts metrics.Counts) {
	s := sample{at: now}
	for _, of := range counts.Requests {
		for i, result := range results {
			s.counts[i] += of[result]
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.samples = append(h.samples, s)
	h.samples = h.samples[max(0, len(h.samples)-samples):]
}

// last returns the requests a second by result, over the last so many samples.
func (h *history) last(n int) (rates [len(results)]float64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.samples) < 2 {
		return rates
	}
	newest, oldest := h.samples[len(h.samples)-1], h.samples[max(0, len(h.samples)-1-n)]
	if elapsed := newest.at.Sub(oldest.at).Seconds(); elapsed > 0 {
		for i := range rates {
			rates[i] = float64(newest.counts[i]-oldest.counts[i]) / elapsed
		}
	}
	return rates
}

// errorShare returns the part of the last minute's requests that ended in an error.
func (h *history) errorShare() float64 {
	all, rates := 0.0, h.last(minute)
	for _, rate := range rates {
		all += rate
	}
	return rates[len(rates)-1] / max(all, math.SmallestNonzeroFloat64)
}

//go:embed page.html
var source string

var page = template.Must(template.New("page").Parse(source))

// policy forbids the browser to load and to run anything but the page's style, whatever the text of a key.
var policy = func() string {
	_, style, _ := strings.Cut(source, "<style>")
	style, _, _ = strings.Cut(style, "</style>")
	sum := sha256.Sum256([]byte(style))
	return "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'; img-src data:; " +
		"base-uri 'none'; form-action 'self'; frame-src 'self'; frame-ancestors 'self'"
}()

// ServeHTTP writes the page.
func (p *Page) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var text bytes.Buffer
	if err := page.Execute(&text, p.view(r.URL.Query())); err != nil {
		p.log.Error("the status page cannot be written", "error", err)
		http.Error(w, "the page cannot be written", http.StatusInternalServerError)
		return
	}
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
	_, _ = w.Write(text.Bytes()) // an error here means that the client has hung up
}

type view struct {
	Frame   bool // the search, which stays, above a frame of the rest, which loads anew
	Refresh int  // seconds, or 0 for never
	IsAway  bool
	Wrong   []string
	Healthy string // what that means
	Now     string
	Facts   [][2]string
	Tables  []table
	Key     string  // that is searched for
	Found   []table // of a search, in place of Tables
	Names   []string
}

// A table has the rows of all databases.
type table struct {
	Title, About, Age string
	Notices, Head     []string
	Rows              [][]cell
	Empty             string // in place of rows
}

type cell struct {
	Text, Title string
	Code, After string // of a remedy: to copy, and what follows
	Tags        []string
	Share       *float64 // of a level
}

func (p *Page) view(asked url.Values) view {
	v := view{Frame: len(asked) == 0, Healthy: "the database answers", Key: asked.Get("key")}
	if asked.Get("refresh") != "off" && v.Key == "" && !v.Frame {
		v.Refresh = int(refreshEvery.Seconds())
	}
	if wrong := p.state.Health(); wrong != "" {
		v.IsAway, v.Wrong = true, []string{wrong}
	}
	if len(p.databases) > 1 {
		v.Healthy = "every shard answers"
		shards := table{Title: "Shards", Head: []string{"Shard", "Database", "State"}}
		for n, d := range p.databases {
			c, state := d.db.Config().ConnConfig, "up"
			if p.state.IsDown(n) {
				state = "down"
				if !v.IsAway {
					v.Wrong = append(v.Wrong, d.name+" is down")
				}
			}
			shards.Rows = append(shards.Rows, texts(strconv.Itoa(n), fmt.Sprintf("%s:%d/%s", c.Host, c.Port, c.Database), state))
		}
		v.Tables = append(v.Tables, shards)
	}
	v.Healthy += fmt.Sprintf(", and at most %g %% of the requests of the last minute ended in an error", 100*maxErrors)
	if share := p.history.errorShare(); share > maxErrors {
		v.Wrong = append(v.Wrong, decimal(100*share)+" % of the requests of the last minute ended in an error")
	}
	seen := p.look(v.IsAway)
	now, counts := p.now(), p.state.Counts()
	v.Now = now.UTC().Format("15:04:05 UTC")
	v.Facts = [][2]string{
		{"Up", span(now.Sub(p.started))},
		{"Calls under way", number(p.state.CallsUnderWay())},
		{"Connections in use", number(p.state.ConnectionsInUse()) + " of " + number(p.state.ConnectionsTotal())},
	}
	if p.state.Prefetches {
		v.Facts = append(v.Facts, [2]string{"Granted in advance", number(counts.Prefetched)})
	}
	rates := table{Title: "Requests a second", About: "Of this server.", Head: []string{"Result", "Now", "Last minute", "Last 10 minutes"}}
	for i, result := range results {
		rates.Rows = append(rates.Rows, texts(string(result), decimal(p.history.last(1)[i]), decimal(p.history.last(minute)[i]), decimal(p.history.last(samples)[i])))
	}
	findings, _ := join(p, seen, table{Title: "Findings", Head: []string{"Severity", "Finding", "Remedy"}, Empty: "All is well."},
		func(s snapshot) section[inspect.Finding] { return s.findings },
		func(all []inspect.Finding) (rows [][]cell) {
			for _, f := range all {
				rows = append(rows, append(texts(f.Severity, f.Finding), remedy(f.Remedy)))
			}
			return rows
		})
	buckets, _ := join(p, seen, table{Title: "Emptiest buckets", Head: bucketHead, Empty: "Every bucket is more than half full."},
		func(s snapshot) section[inspect.Bucket] { return s.buckets }, bucketRows)
	policies, all := join(p, seen, table{
		Title: "Policies", About: "Requests and denials of this server since it started.", Empty: "There is no policy yet.",
		Head: []string{"Policy", "Requests", "Denied", "Capacity", "Refill", "Remembers"},
	}, func(s snapshot) section[client.Policy] { return s.policies }, func(all []client.Policy) [][]cell { return policyRows(all, counts.Requests) })
	if len(policies.Rows) > maxPolicies {
		policies.Rows = policies.Rows[:maxPolicies]
		policies.Notices = append(policies.Notices, fmt.Sprintf("There are more. This page shows the first %d.", maxPolicies))
	}
	for _, policy := range all {
		v.Names = append(v.Names, inspect.Printable(policy.Name))
	}
	v.Tables = append(v.Tables, rates, findings, buckets, policies)
	if key := inspect.Named(v.Key); key != "" {
		found, holders := p.databases[client.ShardOf(key, len(p.databases))].find(inspect.Named(asked.Get("policy")), key)
		of, _ := join(p, []section[inspect.Bucket]{found}, table{Head: bucketHead, Empty: "The bucket has no row: it is full."}, same, bucketRows)
		by, _ := join(p, []section[client.Holder]{holders}, table{Head: []string{"Policy", "Holder", "Slots", "Lease ends in"}}, same, holderRows)
		if v.Found = []table{of}; by.Rows != nil || by.Notices != nil {
			v.Found = append(v.Found, by)
		}
	}
	return v
}

func same[T any](s section[T]) section[T] { return s }

func (p *Page) look(isAway bool) []snapshot {
	seen := make([]snapshot, len(p.databases))
	var looks sync.WaitGroup
	for n, d := range p.databases {
		looks.Go(func() { seen[n] = d.look(isAway || p.state.IsDown(n)) })
	}
	looks.Wait()
	return seen
}

// join fills a table with the sections of all databases, and returns their rows. It is as old as the oldest, and has each notice once.
func join[Row, Of any](p *Page, seen []Of, t table, its func(Of) section[Row], rowsOf func([]Row) [][]cell) (table, []Row) {
	var all []Row
	var oldest time.Time
	for _, of := range seen {
		s := its(of)
		all = append(all, s.rows...)
		if s.notice != "" && !slices.Contains(t.Notices, s.notice) {
			t.Notices = append(t.Notices, s.notice)
		}
		if oldest.IsZero() || !s.at.IsZero() && s.at.Before(oldest) {
			oldest = s.at
		}
	}
	switch age := p.now().Sub(oldest); {
	case oldest.IsZero():
		t.Empty = "Not seen yet."
	case age < time.Second:
		t.Age = "seen just now"
	default:
		t.Age = "seen " + span(age) + " ago"
	}
	if t.Notices != nil {
		t.Empty = ""
	}
	t.Rows = rowsOf(all)
	return t, all
}

var bucketHead = []string{"Policy", "Key", "Tokens left", "Next token", "Full in"}

// bucketRows has the emptiest ones first. A bucket in debt is empty; one above its capacity, after an override, is full.
func bucketRows(all []inspect.Bucket) (rows [][]cell) {
	slices.SortStableFunc(all, func(a, b inspect.Bucket) int { return cmp.Compare(a.Share(), b.Share()) })
	for _, b := range all[:min(len(all), maxBuckets)] {
		level := cell{Text: number(b.Remaining) + " of " + number(b.Capacity), Share: new(max(0, min(1, b.Share())))}
		key := named(b.Key)
		if b.Overridden {
			key.Tags = []string{"override"}
		}
		rows = append(rows, []cell{named(b.Policy), key, level, {Text: until(b.RetryAfter)}, {Text: until(b.ResetAfter)}})
	}
	return rows
}

func holderRows(all []client.Holder) (rows [][]cell) {
	for _, h := range all {
		rows = append(rows, []cell{named(h.Policy), named(h.Holder), {Text: number(h.Cost)}, {Text: span(h.HeldFor)}})
	}
	return rows
}

// policyRows has the most denied policies first, and policies that only requests name.
func policyRows(all []client.Policy, requests map[string]map[client.Result]int64) (rows [][]cell) {
	byName := make(map[string]client.Policy)
	for _, p := range all {
		byName[p.Name] = p // alike in all shards
	}
	sum := make(map[string]int64)
	for name, results := range requests {
		for _, n := range results {
			sum[name] += n
		}
		if _, isThere := byName[name]; !isThere {
			byName[name] = client.Policy{Name: name}
		}
	}
	denied := func(name string) int64 { return requests[name][client.ResultDenied] }
	names := slices.SortedFunc(maps.Keys(byName), func(a, b string) int {
		return cmp.Or(cmp.Compare(denied(b), denied(a)), cmp.Compare(sum[b], sum[a]), strings.Compare(a, b))
	})
	for _, name := range names {
		policy, share := named(name), ""
		capacity, refills, remember, tags := policyOf(byName[name])
		policy.Tags = tags
		if denied(name) > 0 {
			share = " (" + decimal(100*float64(denied(name))/float64(sum[name])) + " %)"
		}
		rows = append(rows, append([]cell{policy}, texts(number(sum[name]), number(denied(name))+share, capacity, refills, remember)...))
	}
	return rows
}

func policyOf(p client.Policy) (capacity, refills, remember string, tags []string) {
	capacity, refills, remember = number(max(0, p.Capacity)), "never", interval(p.Remember) // max, of client.Zero
	switch {
	case p.Name == "_other":
		return "", "of policies that are not known to exist", "", nil
	case p == (client.Policy{Name: p.Name}):
		return "", "not seen in the database", "", nil
	case p.Lease != 0:
		refills, remember = "slots, held for "+interval(p.Lease), ""
	case p.Period != (client.Period{}):
		refills = "full every " + p.Period.String() + ", " + p.TimeZone
	case p.Refill != client.Zero:
		refills = number(p.Refill) + " every " + interval(p.Every)
	}
	for tag, is := range map[string]bool{"stepped": p.Stepped == client.Yes, "ephemeral": p.Durable == client.No, "shadow": p.Shadow == client.Yes} {
		if is {
			tags = append(tags, tag)
		}
	}
	slices.Sort(tags)
	return capacity, refills, remember, tags
}

var statements = regexp.MustCompile(`(?s)^(.*?:|.*)(?:\s+((?:do \$|(?:alter|call|create|drop|grant|select|vacuum) ).*;)(.*))?$`)

// remedy sets the statements of a remedy apart.
func remedy(text string) cell {
	parts := statements.FindStringSubmatch(text)
	return cell{Text: parts[1], Code: parts[2], After: parts[3]}
}

func texts(all ...string) (cells []cell) {
	for _, text := range all {
		cells = append(cells, cell{Text: text})
	}
	return cells
}

// maxName is the longest name that is shown whole, in characters.
const maxName = 120

// named quotes a name that is not printable, and shortens a long one, which is whole in its title.
func named(name string) cell {
	text := inspect.Printable(name)
	if utf8.RuneCountInString(text) <= maxName {
		return cell{Text: text}
	}
	return cell{Text: string([]rune(text)[:maxName]) + "…", Title: text}
}

func number(n int64) string { return message.NewPrinter(language.English).Sprint(n) }

// decimal has one decimal.
func decimal(rate float64) string {
	return strings.TrimSuffix(message.NewPrinter(language.English).Sprintf("%.1f", rate), ".0")
}

// interval writes a time exactly, as a policy file does.
func interval(d time.Duration) string { return policyfile.Span(d.Microseconds()).String() }

// span writes a time rounded down, to be read at a glance.
func span(d time.Duration) string {
	unit := time.Hour
	switch {
	case d < time.Millisecond:
		return "< 1ms"
	case d < time.Second:
		unit = time.Millisecond
	case d < time.Hour:
		unit = time.Second
	case d < 24*time.Hour:
		unit = time.Minute
	}
	return interval(d.Truncate(unit))
}

// until writes a time of the database, of which nil is never.
func until(s *jsonapi.Seconds) string {
	switch {
	case s == nil:
		return "never"
	case *s == 0:
		return "now"
	}
	return span(time.Duration(*s))
}

// Guard rejects requests without one of the tokens.
//
// If no token is needed, Guard rejects requests whose Host is neither an address nor localhost. Another site can point its name to
// this server, and its pages could then read this page.
func Guard(tokens auth.Tokens, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case !tokens.AdmitBrowser(r):
			w.Header().Add("WWW-Authenticate", `Basic realm="pgratelimit", charset="UTF-8"`)
			w.Header().Add("WWW-Authenticate", "Bearer")
			http.Error(w, "This page needs a token: give one as the password, with any user name.", http.StatusUnauthorized)
		case tokens.IsOpen() && !auth.IsAddress(r.Host):
			http.Error(w, "Without TOKENS this page is shown at localhost or at an address, and not under a name.", http.StatusForbidden)
		default:
			next.ServeHTTP(w, r)
		}
	})
}
