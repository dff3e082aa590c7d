<?php
// An API that asks pgratelimit's server over JSON, with nothing but PHP. Every process shares the server's connections.
//
//   php -S localhost:3000 json.php
//   curl -i -H 'X-User: 42' localhost:3000/

function acquire(string $key, int $cost): array
{
    $server = getenv('RATELIMIT_URL') ?: 'http://localhost:8080';
    $token = getenv('RATELIMIT_TOKEN'); // one of the server's TOKENS, if it has any
    $context = stream_context_create(['http' => [
        'method' => 'POST',
        'header' => "Content-Type: application/json\r\n" . ($token ? "Authorization: Bearer $token\r\n" : ''),
        'content' => json_encode(['policy' => 'api', 'key' => $key, 'cost' => $cost], JSON_THROW_ON_ERROR),
        'timeout' => 1,
    ]]);
    $body = @file_get_contents("$server/v1/acquire", false, $context); // false for any status but 2xx
    if ($body === false) {
        throw new RuntimeException($http_response_header[0] ?? 'no answer');
    }
    return json_decode($body, true, flags: JSON_THROW_ON_ERROR);
}

// What each path costs, in tokens.
$cost = ['/' => 1, '/export' => 10][$_SERVER['REQUEST_URI']] ?? null;
$user = $_SERVER['HTTP_X_USER'] ?? null; // an API of yours knows whom it has authenticated
if (!$cost || !$user) {
    http_response_code($cost ? 401 : 404);
    return;
}
try {
    $d = acquire("user:$user", $cost);
} catch (Exception $e) {
    error_log("no decision: {$e->getMessage()}");
    http_response_code(503); // or go on without a limit: that is for you to decide
    return;
}
if (!$d['allowed']) {
    http_response_code(429);
    // Null means that no wait helps: the cost exceeds the capacity, or nothing refills the bucket.
    if ($d['retry_after'] !== null) header('Retry-After: ' . (int) ceil($d['retry_after']));
    echo "too many requests\n";
    return;
}
echo "hello, $user: {$d['remaining']} tokens left\n";
