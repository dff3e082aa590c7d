// Package page is the status page: it shows a server and its databases in a browser.
package page

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	_ "embed" // the template and its style
	"encoding/base64"
	"fmt"
	"html/template"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/auth"
	"github.com/pgratelimit/pgratelimit/server/internal/inspect"
	"github.com/pgratelimit/pgratelimit/server/internal/metrics"
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
	history   *history
	databases []*database // one, or its shards
	state     State
	log       *slog.Logger
	now       func() time.Time
	started   time.Time
}

// New returns a Page.
func New(databases []*pgxpool.Pool, state State, log *slog.Logger) *Page {
	return newPage(databases, state, log, time.Now)
}

func newPage(databases []*pgxpool.Pool, state State, log *slog.Logger, now func() time.Time) *Page {
	p := &Page{state: state, log: log, now: now, started: now()}
	p.history = &history{begun: p.started}
	for _, db := range databases {
		p.databases = append(p.databases, newDatabase(db, log, now))
	}
	return p
}

// Run adds to the history until ctx ends.
func (p *Page) Run(ctx context.Context) {
	ticker := time.NewTicker(sampleEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			p.sample()
		}
	}
}

func (p *Page) sample() {
	var counts tally
	for _, of := range p.state.Counts().Requests {
		for i, result := range results {
			counts[i] += of[result.Result]
		}
	}
	p.history.sample(p.now(), counts)
}

//go:embed page.html
var source string

//go:embed style.css
var style string

var page = template.Must(template.New("page").Funcs(template.FuncMap{"name": name, "whole": whole, "number": number, "until": until, "span": span}).Parse(source))

// policy forbids the browser to load and to run anything but the page's style, whatever the text of a key.
var policy = func() string {
	sum := sha256.Sum256([]byte(style))
	return "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'; img-src data:; " +
		"base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
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

// A view has the data of the template.
type view struct {
	Style    template.CSS
	Refresh  int // seconds, or 0 for never
	IsAway   bool
	Wrong    []string
	Healthy  string // what that means
	Now      string
	Facts    []fact
	Shards   []shard // none of one database
	Plots    []plot
	Rare     []plot // that are flat in most installations
	IsRare   bool   // one of these is not flat
	Search   search
	Findings part[inspect.Finding]
	Buckets  part[bucket]
	Policies part[policyRow]
}

type fact struct{ Name, Value string }

type shard struct {
	Number int
	Place  string
	IsDown bool
}

// A search has the request, and the buckets that were found for a Key, with the holders of its slots.
type search struct {
	Policy, Key string
	Names       []string // of policies
	Buckets     part[bucket]
	Holders     part[client.Holder]
}

// A part is a section of all databases.
type part[T any] struct {
	Rows    []T
	IsRead  bool // so that no rows are an answer, too
	Age     string
	Notices []string
	More    bool // than Rows
}

type bucket struct {
	inspect.Bucket
	Percent float64 // of the capacity, from 0 to 100
	IsEmpty bool
}

// A policyRow has no Refills if only requests name the policy.
type policyRow struct {
	client.Policy
	Refills          string
	Remember         string
	Tags             []string
	Requests, Denied int64
	DeniedShare      string
}

func (p *Page) view(asked url.Values) view {
	v := view{
		Style:   template.CSS(style), // ours
		Healthy: "the database answers",
		Search:  search{Policy: asked.Get("policy"), Key: asked.Get("key")},
	}
	if asked.Get("refresh") != "off" && v.Search.Key == "" {
		v.Refresh = int(refreshEvery.Seconds())
	}
	if wrong := p.state.Health(); wrong != "" {
		v.IsAway, v.Wrong = true, []string{wrong}
	}
	if len(p.databases) > 1 {
		v.Healthy = "every shard answers"
		for n, d := range p.databases {
			c := d.db.Config().ConnConfig
			s := shard{n, fmt.Sprintf("%s:%d/%s", c.Host, c.Port, c.Database), p.state.IsDown(n)}
			if s.IsDown && !v.IsAway {
				v.Wrong = append(v.Wrong, p.nameOf(n)+" is down")
			}
			v.Shards = append(v.Shards, s)
		}
	}
	v.Healthy += fmt.Sprintf(", and at most %g %% of the requests of the last minute ended in an error", 100*maxErrors)
	if share := p.history.errorShare(); share > maxErrors {
		v.Wrong = append(v.Wrong, perSecond(100*share)+" % of the requests of the last minute ended in an error")
	}
	seen := p.look(v.IsAway)
	now, counts := p.now(), p.state.Counts()
	v.Now = now.UTC().Format("15:04:05 UTC")
	v.Facts = []fact{
		{"Up", span(now.Sub(p.started))},
		{"Calls under way", number(p.state.CallsUnderWay())},
		{"Connections in use", number(p.state.ConnectionsInUse()) + " of " + number(p.state.ConnectionsTotal())},
	}
	if p.state.Prefetches {
		v.Facts = append(v.Facts, fact{"Granted in advance", number(counts.Prefetched)})
	}
	for i, result := range results {
		plot := plotOf(i, p.history.of(i))
		if result.Result == client.ResultReplayed || result.Result == client.ResultShadowed {
			v.Rare = append(v.Rare, plot)
			v.IsRare = v.IsRare || plot.Peak != "0"
		} else {
			v.Plots = append(v.Plots, plot)
		}
	}
	v.Findings = partOf(p, seen, func(s snapshot) section[inspect.Finding] { return s.findings }, func(n int, f inspect.Finding) inspect.Finding {
		if len(seen) > 1 {
			f.Finding = p.nameOf(n) + ": " + f.Finding
		}
		return f
	})
	v.Buckets = partOf(p, seen, func(s snapshot) section[inspect.Bucket] { return s.buckets }, bucketOf)
	slices.SortStableFunc(v.Buckets.Rows, func(a, b bucket) int { return cmp.Compare(a.Share(), b.Share()) })
	v.Buckets.Rows = v.Buckets.Rows[:min(len(v.Buckets.Rows), maxBuckets)]
	v.Policies = partOf(p, seen, func(s snapshot) section[client.Policy] { return s.policies }, policyOf)
	v.Policies.Rows = counted(v.Policies.Rows, counts.Requests)
	for _, row := range v.Policies.Rows {
		v.Search.Names = append(v.Search.Names, inspect.Printable(row.Name))
	}
	slices.Sort(v.Search.Names)
	if len(v.Policies.Rows) > maxPolicies {
		v.Policies.Rows, v.Policies.More = v.Policies.Rows[:maxPolicies], true
	}
	if key := inspect.Named(v.Search.Key); key != "" {
		buckets, holders := p.databases[client.ShardOf(key, len(p.databases))].find(inspect.Named(v.Search.Policy), key)
		v.Search.Buckets = partOf(p, []section[inspect.Bucket]{buckets}, func(s section[inspect.Bucket]) section[inspect.Bucket] { return s }, bucketOf)
		v.Search.Holders = partOf(p, []section[client.Holder]{holders}, func(s section[client.Holder]) section[client.Holder] { return s },
			func(_ int, h client.Holder) client.Holder { return h })
	}
	return v
}

func (p *Page) look(isAway bool) []snapshot {
	seen := make([]snapshot, len(p.databases))
	var looks sync.WaitGroup
	for n, d := range p.databases {
		looks.Go(func() { seen[n] = d.look(isAway || p.state.IsDown(n)) })
	}
	looks.Wait()
	return seen
}

func (p *Page) nameOf(shard int) string {
	return fmt.Sprintf("shard %d of %d", shard, len(p.databases))
}

// partOf joins the sections of all databases. It is as old as the oldest section, and has each notice once.
func partOf[From, To, Of any](p *Page, seen []Of, its func(Of) section[From], convert func(n int, row From) To) part[To] {
	var is part[To]
	var oldest time.Time
	for n, of := range seen {
		s := its(of)
		for _, row := range s.rows {
			is.Rows = append(is.Rows, convert(n, row))
		}
		if s.notice != "" && !slices.Contains(is.Notices, s.notice) {
			is.Notices = append(is.Notices, s.notice)
		}
		if oldest.IsZero() || !s.at.IsZero() && s.at.Before(oldest) {
			oldest = s.at
		}
	}
	if is.IsRead = !oldest.IsZero(); is.IsRead {
		is.Age = "just now"
		if age := p.now().Sub(oldest); age >= time.Second {
			is.Age = span(age) + " ago"
		}
	}
	return is
}

func bucketOf(_ int, b inspect.Bucket) bucket {
	return bucket{Bucket: b, Percent: 100 * max(0, min(1, b.Share())), IsEmpty: b.Remaining < 1}
}

func policyOf(_ int, p client.Policy) policyRow {
	row := policyRow{Policy: p, Refills: "never", Remember: interval(p.Remember)}
	row.Capacity = max(0, p.Capacity) // of client.Zero
	switch {
	case p.Lease != 0:
		row.Refills, row.Remember = "slots, held for "+interval(p.Lease), ""
	case p.Period != (client.Period{}):
		row.Refills = "full every " + p.Period.String() + ", " + p.TimeZone
	case p.Refill != client.Zero:
		row.Refills = number(p.Refill) + " every " + interval(p.Every)
	}
	for _, tag := range []struct {
		is   bool
		name string
	}{{p.Stepped == client.Yes, "stepped"}, {p.Durable == client.No, "ephemeral"}, {p.Shadow == client.Yes, "shadow"}} {
		if tag.is {
			row.Tags = append(row.Tags, tag.name)
		}
	}
	return row
}

// counted adds the requests to the rows of their policies, and rows for policies that only requests name. The most denied come
// first.
func counted(rows []policyRow, requests map[string]map[client.Result]int64) []policyRow {
	byName := make(map[string]policyRow)
	for _, row := range rows {
		byName[row.Name] = row // alike in all shards
	}
	for name, results := range requests {
		row := byName[name]
		row.Name, row.Denied = name, results[client.ResultDenied]
		for _, n := range results {
			row.Requests += n
		}
		if row.Denied > 0 {
			row.DeniedShare = perSecond(100*float64(row.Denied)/float64(row.Requests)) + " %"
		}
		byName[name] = row
	}
	return slices.SortedFunc(maps.Values(byName), func(a, b policyRow) int {
		return cmp.Or(cmp.Compare(b.Denied, a.Denied), cmp.Compare(b.Requests, a.Requests), strings.Compare(a.Name, b.Name))
	})
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
