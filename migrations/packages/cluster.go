package packages

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// Cluster is the SQL that lists shards for PL/Proxy: the foreign server ratelimit, and how the role that runs it logs in. The
// URLs are those of SHARD_URLS, separated by spaces. PostgreSQL shows the options of a server to everybody and hides those of a
// user mapping, so all URLs have one role and one password.
func Cluster(shardURLs string) (string, error) {
	urls := strings.Fields(shardURLs)
	if n := len(urls); n == 0 || n&(n-1) != 0 {
		return "", fmt.Errorf("%d databases are listed, and the number of shards is a power of two", n)
	}
	var options []string
	var login map[string]string
	for n, text := range urls {
		u, err := url.Parse(text)
		if err != nil || !strings.HasPrefix(u.Scheme, "postgres") {
			return "", fmt.Errorf("shard %d: its URL is not of the form postgres://host/name", n)
		}
		// What bounds the wait for a host that has fallen silent: PL/Proxy 2.10 looks at its query_timeout only when something
		// arrives, and knows none for connecting.
		words := map[string]string{"tcp_user_timeout": "5000", "host": u.Hostname(), "port": u.Port(), "dbname": strings.TrimPrefix(u.Path, "/"), "user": u.User.Username()}
		words["password"], _ = u.User.Password()
		for name, values := range u.Query() {
			words[name] = values[0]
		}
		its := map[string]string{}
		for _, name := range []string{"user", "password"} {
			if words[name] != "" {
				its[name] = words[name]
			}
			delete(words, name)
		}
		if login != nil && !maps.Equal(login, its) {
			return "", errors.New("all shards are reached by one role with one password")
		}
		login = its
		options = append(options, "p"+strconv.Itoa(n)+" "+literal(connectionString(words)))
	}
	mapping := ""
	if len(login) > 0 {
		var words []string
		for _, name := range slices.Sorted(maps.Keys(login)) {
			words = append(words, name+" "+literal(login[name]))
		}
		mapping = " options (" + strings.Join(words, ", ") + ")"
	}
	return fmt.Sprintf(`create extension if not exists plproxy;
drop server if exists ratelimit cascade;
create server ratelimit foreign data wrapper plproxy options (
  %s);
create user mapping for current_user server ratelimit%s;
`, strings.Join(options, ",\n  "), mapping), nil
}

// connectionString is one of libpq.
func connectionString(words map[string]string) string {
	var pairs []string
	for _, name := range slices.Sorted(maps.Keys(words)) {
		if words[name] != "" {
			pairs = append(pairs, name+"='"+strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(words[name])+"'")
		}
	}
	return strings.Join(pairs, " ")
}

// literal is a text in SQL, whatever standard_conforming_strings says.
func literal(text string) string {
	text = strings.ReplaceAll(text, "'", "''")
	if strings.Contains(text, `\`) {
		return "E'" + strings.ReplaceAll(text, `\`, `\\`) + "'"
	}
	return "'" + text + "'"
}
